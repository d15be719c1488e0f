"""The model: its folder, its weights, and its parameters sharded over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tunewright.contract.failures import UserError
from tunewright.contract.settings import FsdpSettings
from tunewright.training import attention, fp8, head, weights
from tunewright.training.base import BaseModel, read_config
from tunewright.training.head import LossHead
from tunewright.training.plan import seed_of
from tunewright.training.world import World


@dataclass(frozen=True)
class ShardedModel:
    """A model whose parameters are DTensors, fp32, with their Hugging Face names.

    tied: {left out name: the name it shares its tensor with}; only the latter is a parameter.
    dtype: of activations. head: makes the loss without keeping logits, where the model allows it.
    compiled, precision: what is done, for the receipt. whole: gathered weights are kept during a
    step. through: a wrapper that calls of the model go through, since it reduces gradients.
    """

    module: Any
    parameters: dict[str, nn.Parameter]
    tied: dict[str, str]
    dtype: torch.dtype
    precision: str
    compiled: bool
    head: LossHead | None
    whole: bool = False
    through: Any = None

    @property
    def needs_shape(self) -> bool:
        """Whether rows must be padded to one shape: compiled layers, and products of 8 bits."""
        return self.compiled or self.precision == "fp8"

    @property
    def layers(self) -> nn.ModuleList:
        return decoder_layers(self.module)

    @property
    def copies(self) -> int:
        """How many ranks hold each number of the parameters and of their gradients."""
        return 1

    @property
    def recomputes(self) -> bool:
        return bool(getattr(self.layers[0], "gradient_checkpointing", False))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters as plain fp32 DTensors over the same memory, to be saved or filled."""
        return {name: fp8.plain(p.detach()) for name, p in self.parameters.items()}

    def require_vocabulary(self, ids: int) -> None:
        """Raise UserError unless every token id below `ids` has an embedding."""
        rows = self.module.get_input_embeddings().num_embeddings
        if ids > rows:
            raise UserError(
                f"the tokens use ids up to {ids - 1}, but the model has {rows} embeddings; "
                "model_name and its tokenizer do not belong together"
            )

    def accumulate(self, last: bool) -> None:
        """Called before each micro-batch of a step, `last` before its last one.

        A model that stays whole in a step is gathered once in it. A rank that is alone has nothing
        to reduce before the end; others reduce each time, which takes less memory.
        """
        if self.whole:
            self.module.set_reshard_after_backward(last)
        if dist.get_world_size() == 1:
            self.module.set_requires_gradient_sync(last)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Those that belong in a saved model, whole on every rank."""
        saved = self.module.state_dict().keys()
        return {name: b for name, b in self.module.named_buffers() if name in saved}

    @property
    def count(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def matmul_count(self) -> int:
        """Parameters that multiply: matrices, with the head but without a plain look-up table."""
        total = sum(p.numel() for p in self.parameters.values() if p.ndim > 1)
        inputs = self.module.get_input_embeddings().weight
        shared = inputs is self.module.get_output_embeddings().weight
        return total if shared else total - inputs.numel()


M = TypeVar("M", bound=ShardedModel)


def build(base: BaseModel, settings: FsdpSettings, world: World) -> ShardedModel:
    """The model on every rank, its parameters sharded, with the base model's or random weights.

    The weights are the same for any number of ranks. Beside its shards a rank holds one layer, or
    one tensor, at a time; `weights` says when rank 0 needs more.
    """
    dtype = compute_dtype(settings, world.device)
    config = world.on_main(lambda: read_config(base))
    module = skeleton(config, attention.choose(config, world.device, dtype, settings.plain))
    if settings.precision == "fp8":
        fp8.convert(decoder_layers(module), world.device, world.size)
    tied = tied_names(module)
    if settings.init == "random":
        _make_random(module, settings.seed, dtype, world)
    else:
        _shard(module, dtype, world)
        module.to_empty(device=world.device)
        module.tie_weights()
        weights.init_buffers(module)
        weights.load_pretrained(module, base.name, base.folder, world)
    fp8.refresh_scales(module)
    model = ShardedModel(
        module.train(),
        dict(module.named_parameters()),
        tied,
        dtype,
        "fp8" if settings.precision == "fp8" else "bf16" if dtype == torch.bfloat16 else "fp32",
        settings.compiles(on_gpu=world.device.type == "cuda"),
        None,
    )
    return ready(model, settings, world.device)


def ready(model: M, settings: FsdpSettings, device: torch.device) -> M:
    """The model once it has weights: checked, with a loss head, recomputing and compiled as set."""
    module = model.module
    with inference(model):
        check_isolation(model, device)
        if not settings.plain:
            found = head.attach(module, model.compiled, lambda: attention.probe(module, device))
            model = replace(model, head=found)
    if settings.gradient_checkpointing is True:
        recompute(model)
    if model.compiled:
        compile_layers(model)
    return model


def compute_dtype(settings: FsdpSettings, device: torch.device) -> torch.dtype:
    """The type of activations: bf16 where asked for, or on a GPU that has it; else fp32.

    With fp8 it is bf16 too: only the factors of the layers' matrix products have 8 bits.
    """
    gpu_has_it = device.type == "cuda" and torch.cuda.is_bf16_supported()
    wanted = settings.precision in ("bf16", "fp8") or (settings.precision == "auto" and gpu_has_it)
    return torch.bfloat16 if wanted else torch.float32


@contextmanager
def inference(model: ShardedModel) -> Iterator[None]:
    """Forward passes without gradients or dropout; afterwards every parameter is a shard again."""
    model.module.eval()
    with torch.no_grad():
        yield
    # Without a backward pass FSDP leaves some parameters whole.
    for part in model.module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    model.module.train()


def recompute(model: ShardedModel) -> None:
    """Let the layers recompute their activations in the backward pass.

    Raises UserError for a model that cannot.
    """
    module = model.module
    if not module.supports_gradient_checkpointing:
        raise UserError(
            f"gradient_checkpointing: {type(module).__name__} cannot recompute; set it to false"
        )
    newer = getattr(module, "activation_checkpointing_enable", None)
    (newer or module.gradient_checkpointing_enable)({"use_reentrant": False})


def keep_whole(model: M) -> M:
    """The same model, which gathers its weights once a step and then needs room for all of them."""
    model.module.set_reshard_after_forward(False)
    return replace(model, whole=True)


def gather_singly(model: ShardedModel) -> None:
    """Gather a layer's weights when they are needed and no earlier, into memory that the last
    layer's had: for layers so large that two of them at once would leave no room."""
    for part in model.module.modules():
        if isinstance(part, FSDPModule):
            part._set_unshard_async_op(True)
            # One that is told to fetch itself fetches none ahead.
            part.set_modules_to_backward_prefetch([part])


def compile_layers(model: ShardedModel) -> None:
    """Compile what is inside of each decoder layer; FSDP's hooks stay outside and still run.

    The layers share one program. A layer that cannot be compiled as one piece is an error, not a
    slow success; the `compile` setting turns this off.
    """
    import torch._dynamo
    import torch._functorch.config

    # What a layer's cheap operations gave is made again where a matrix product of the backward pass
    # needs it, such as what goes into the last product of an MLP: a fifth of all activations.
    torch._functorch.config.ban_recompute_materialized_backward = False
    # One program for each number of tokens, with and without gradients.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True)


@contextmanager
def only(module: Any, places: Collection[int]) -> Iterator[None]:
    """Inside, the other decoder layers pass on what they get.

    Older models have layers that give tuples; which kind these are is learnt from those that run,
    so the first layer must be among them the first time.
    """

    def learn(_: nn.Module, inputs: Any, output: Any) -> None:
        module._layers_give_tuples = isinstance(output, tuple)

    def passing(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if module._layers_give_tuples else hidden_states

    layers = list(enumerate(decoder_layers(module)))
    others = [layer for place, layer in layers if place not in places]
    hooks = [layer.register_forward_hook(learn) for place, layer in layers if place in places]
    before = [layer.forward for layer in others]
    for layer in others:
        layer.forward = passing
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, forward in zip(others, before, strict=True):
            layer.forward = forward


def check_isolation(model: ShardedModel, device: torch.device) -> None:
    """Packed documents must not see each other; raises UserError where they do.

    With 8 bits the documents of a row share a scale and so move each other's rounding, which a
    whole model amplifies: one layer of each kind is looked at by itself then.
    """
    if model.precision != "fp8":
        attention.check_isolation(model.module, device, tolerance=1e-3)
        return
    kinds = getattr(model.module.config.get_text_config(), "layer_types", None)
    first: dict[Any, int] = {}
    for place, layer in enumerate(model.layers):
        first.setdefault((type(layer), kinds[place] if kinds else None), place)
    for place in first.values():
        with only(model.module, [place]):
            attention.check_isolation(model.module, device, tolerance=0.1)


def decoder_layers(module: Any) -> nn.ModuleList:
    """The list of decoder layers, found by its length and weight rather than by a name.

    Raises UserError for a model that has none.
    """
    layers = module.config.get_text_config().num_hidden_layers
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    if not lists:
        raise UserError(
            f"model_name: no list of {layers} decoder layers in {type(module).__name__}; "
            "this recipe shards decoder-only transformers"
        )
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))


def takes_places(module: Any) -> bool:
    """Whether the model can be asked for the logits of some places only."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters


def skeleton(config: Any, implementation: str | None) -> Any:
    """The model without memory for its parameters, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=implementation
        )


def tied_names(module: Any) -> dict[str, str]:
    """{name: first name of the same tensor} of every parameter with more than one name."""
    first: dict[int, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    pairs = [(name, first.setdefault(id(tensor), name)) for name, tensor in names]
    return {name: original for name, original in pairs if name != original}


def _make_random(module: Any, seed: int, dtype: torch.dtype, world: World) -> None:
    """Random weights, each unit sharded as soon as it has them."""
    layers = decoder_layers(module)
    *inner, outer = weights.units(module, layers)
    mesh = mesh_of(world)
    for place, (layer, unit) in enumerate(zip(layers, inner, strict=True)):
        weights.init_random(module, unit, seed_of(seed, place), world.device)
        shard_unit(layer, dtype, mesh)
    weights.init_random(module, outer, seed_of(seed, len(layers)), world.device)
    module.tie_weights()
    shard_outer(module, dtype, mesh)


def _shard(module: Any, dtype: torch.dtype, world: World) -> None:
    """Shard each decoder layer and the rest: fp32 shards, computed in `dtype`, reduced in fp32."""
    mesh = mesh_of(world)
    for layer in decoder_layers(module):
        shard_unit(layer, dtype, mesh)
    shard_outer(module, dtype, mesh)


def shard_outer(module: Any, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    """Embedding, head, and what is left. The head stays whole from its forward to its backward
    pass, which follow each other at once; the last layer too."""
    inputs, outputs = module.get_input_embeddings(), module.get_output_embeddings()
    if outputs is not None and inputs.weight is not outputs.weight:
        shard_unit(inputs, dtype, mesh)
        shard_unit(outputs, dtype, mesh, reshard=False)
    last: Any = decoder_layers(module)[-1]
    last.set_reshard_after_forward(False, recurse=False)
    shard_unit(module, dtype, mesh)


def shard_unit(
    unit: nn.Module, dtype: torch.dtype, mesh: DeviceMesh, reshard: bool | None = None
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def mesh_of(world: World) -> DeviceMesh:
    return init_device_mesh(world.device.type, (dist.get_world_size(),))
