"""The model: its folder, its weights, and its parameters sharded over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tunewright.contract.failures import UserError
from tunewright.contract.settings import FsdpSettings, is_path
from tunewright.training import attention
from tunewright.training.plan import seed_of
from tunewright.training.world import World

WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class BaseModel:
    """What training starts from: its name and revision as asked for and found, and its folder."""

    name: str
    revision: str | None
    folder: Path


@dataclass(frozen=True)
class ShardedModel:
    """A model whose parameters are DTensors, fp32, with their Hugging Face names.

    tied: {left out name: the name it shares its tensor with}; only the latter is a parameter.
    """

    module: Any
    parameters: dict[str, nn.Parameter]
    tied: dict[str, str]
    dtype: torch.dtype

    def require_vocabulary(self, ids: int) -> None:
        """Raise UserError unless every token id below `ids` has an embedding."""
        rows = self.module.get_input_embeddings().num_embeddings
        if ids > rows:
            raise UserError(
                f"the tokens use ids up to {ids - 1}, but the model has {rows} embeddings; "
                "model_name and its tokenizer do not belong together"
            )

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


def find_base(settings: FsdpSettings) -> BaseModel:
    """The folder of the base model; a Hub model is downloaded first. For rank 0 only.

    Raises UserError when there is no such model, or no weights where they are asked for.
    """
    name = settings.model_name
    base = _local(name) if is_path(name) else _from_hub(settings)
    if not (base.folder / "config.json").is_file():
        raise UserError(f"model_name: {name} has no config.json; name a Hugging Face model folder")
    if settings.init == "pretrained" and not any(_weights_in(base.folder)):
        raise UserError(
            f"model_name: {name} has no weights ({', '.join(WEIGHTS)}); "
            "set init: random to start from scratch, or name a folder with weights"
        )
    return base


def build(base: BaseModel, settings: FsdpSettings, world: World) -> ShardedModel:
    """The model on every rank, its parameters sharded, with the base model's or random weights.

    The weights come from rank 0, one tensor at a time, so they are the same for any number of
    ranks. Rank 0 holds the whole model in host memory (4 bytes a parameter) while it hands out.
    """
    dtype = compute_dtype(settings, world.device)
    held: list[Any] = []  # the whole model, on rank 0

    def read() -> Any:
        held.append(_source(base, settings))
        return held[0].config

    config = world.on_main(read)
    module = _skeleton(config, attention.choose(config, world.device, dtype))
    tied = _tied(module)
    if settings.gradient_checkpointing:
        _recompute(module)
    _shard(module, dtype)
    module.to_empty(device=world.device)
    module.tie_weights()
    _hand_out(module, held.pop() if held else None, world)
    model = ShardedModel(module.train(), dict(module.named_parameters()), tied, dtype)
    with inference(model):
        attention.check_isolation(module, world.device)
    return model


def compute_dtype(settings: FsdpSettings, device: torch.device) -> torch.dtype:
    """The type of activations: bf16 where asked for, or on a GPU that has it; else fp32."""
    gpu_has_it = device.type == "cuda" and torch.cuda.is_bf16_supported()
    wanted = settings.precision == "bf16" or (settings.precision == "auto" and gpu_has_it)
    return torch.bfloat16 if wanted else torch.float32


@contextmanager
def inference(model: ShardedModel) -> Iterator[None]:
    """Forward passes without gradients or dropout; afterwards every parameter is a shard again."""
    model.module.eval()
    with torch.no_grad():
        yield
    # Without a backward pass FSDP leaves the root's parameters whole.
    model.module.reshard()
    model.module.train()


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


def _local(name: str) -> BaseModel:
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"model_name: there is no folder {name}")
    return BaseModel(name, None, folder)


def _from_hub(settings: FsdpSettings) -> BaseModel:
    """Download what training and export need. The revision found is the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, revision = settings.model_name, settings.model_revision
    patterns = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
    if settings.init == "pretrained":
        patterns.append("*.safetensors")
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise UserError(
            f"model_name: {name} is gated; accept its licence on the Hub, then set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"model_revision: {name} has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"model_name: the Hub has no model {name}, or HF_TOKEN may not see it; "
            "a folder is written with ./, ../, / or ~ in front"
        ) from None
    return BaseModel(name, folder.name, folder)


def _weights_in(folder: Path) -> Iterator[Path]:
    return (path for pattern in WEIGHTS for path in folder.glob(pattern))


def _source(base: BaseModel, settings: FsdpSettings) -> Any:
    """The whole model on the host, fp32. Random weights follow from the seed alone."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed_of(settings.seed))
    try:
        if settings.init == "random":
            config = AutoConfig.from_pretrained(base.folder)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model, report = AutoModelForCausalLM.from_pretrained(
            base.folder, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model_name: {base.name} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"model_name: {base.name} has no weights for {', '.join(missing[:5])}"
            f"{' and more' if len(missing) > 5 else ''}; its files do not fit its config.json"
        )
    return model


def _skeleton(config: Any, implementation: str | None) -> Any:
    """The model without memory for its parameters, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=implementation
        )


def _recompute(module: Any) -> None:
    """Let the layers recompute their activations in the backward pass."""
    if not module.supports_gradient_checkpointing:
        raise UserError(
            f"gradient_checkpointing: {type(module).__name__} cannot recompute; set it to false"
        )
    newer = getattr(module, "activation_checkpointing_enable", None)
    (newer or module.gradient_checkpointing_enable)({"use_reentrant": False})


def _tied(module: Any) -> dict[str, str]:
    """{name: first name of the same tensor} of every parameter with more than one name."""
    first: dict[int, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    pairs = [(name, first.setdefault(id(tensor), name)) for name, tensor in names]
    return {name: original for name, original in pairs if name != original}


def _shard(module: Any, dtype: torch.dtype) -> None:
    """Shard each decoder layer and the rest: fp32 shards, computed in `dtype`, reduced in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(_device_type(), (dist.get_world_size(),))
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    assert isinstance(module, FSDPModule)


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def _hand_out(module: Any, source: Any, world: World) -> None:
    """Copy rank 0's parameters and buffers to every rank, each rank keeping its shard."""
    whole = dict(source.named_parameters()) if source is not None else {}
    for name, shard in module.named_parameters():
        assert isinstance(shard, DTensor), f"{name} is not sharded"
        full = _here(whole.get(name), shard.shape, shard.dtype, world)
        shard.copy_(distribute_tensor(full, shard.device_mesh, shard.placements))
    # Some, such as the rotary frequencies, are in no file: they are made with the model.
    whole = dict(source.named_buffers()) if source is not None else {}
    for name, buffer in module.named_buffers():
        full = _here(whole.get(name), buffer.shape, buffer.dtype, world)
        dist.broadcast(full, src=0)
        buffer.copy_(full)


def _here(
    value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, world: World
) -> torch.Tensor:
    """Rank 0's tensor on this device, or room for it."""
    if value is None:
        return torch.empty(shape, dtype=dtype, device=world.device)
    return value.detach().to(world.device, dtype).contiguous()
