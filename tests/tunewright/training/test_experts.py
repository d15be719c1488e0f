"""Experts with adapters by grouped products, against PEFT, which adds the adapters' product in."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch.nn import functional

from tunewright.training.lora import experts
from tunewright.training.lora.adapters import adapted
from tunewright.training.timing import compiled_graphs

WIDTH, INNER, STACKED, CHOSEN = 32, 48, 4, 2
MODELS = {
    # Stored as it is multiplied, with biases; then the other way round.
    "gpt_oss": {"num_local_experts": STACKED},
    "qwen3_moe": {"num_experts": STACKED, "moe_intermediate_size": INNER},
    "mixtral": {"num_local_experts": STACKED},
}


def built(kind: str, rank: int = 8):
    """A layer's experts with adapters that add something, twice: ours, and PEFT's own."""
    theirs = with_adapters(kind, rank)
    model = copy.deepcopy(theirs)
    assert experts.attach(model)
    return outer(model), outer(theirs)


def with_adapters(kind: str, rank: int = 8, layers: int = 1):
    """A random model in fp32 whose experts have adapters, all as PEFT has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts_per_tok=CHOSEN,
        initializer_range=0.2, pad_token_id=0, **MODELS[kind],
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.requires_grad_(False)
    stacked = [name for name, p in model.named_parameters() if p.ndim == 3]
    assert len(stacked) == 2 * layers
    adapted(model, LoraConfig(r=rank, target_modules=[], target_parameters=stacked))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def outer(model):
    (found,) = experts._outermost(model)
    return found


def inputs(dtype=torch.float32, tokens=24):
    drawn = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, WIDTH, generator=drawn).to(dtype)
    # Expert 1 is chosen by no token.
    places = torch.tensor([0, 2, 3])
    chosen = torch.stack([places[torch.randperm(3, generator=drawn)[:CHOSEN]] for _ in hidden])
    shares = torch.rand(tokens, CHOSEN, generator=drawn).to(dtype)
    return hidden, chosen, shares


def results(wrapper, dtype=torch.float32):
    """Output, and the gradients of inputs and adapters."""
    device = next(wrapper.parameters()).device
    hidden, chosen, shares = (t.to(device) for t in inputs(dtype))
    hidden.requires_grad_()
    shares.requires_grad_()
    trained = {n: p for n, p in wrapper.named_parameters() if p.requires_grad}
    assert len(trained) == 4
    found = wrapper(hidden, chosen, shares)
    grads = torch.autograd.grad(found.float().square().sum(), [hidden, shares, *trained.values()])
    return dict(zip(["output", "hidden", "shares", *trained], [found, *grads], strict=True))


@pytest.mark.parametrize("rank", [8, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_grouped_products_equal_peft(kind, rank):
    ours, theirs = (results(wrapper) for wrapper in built(kind, rank))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.abs().max() > 0, name
        assert (ours[name] - value).abs().max() < 1e-5 * value.abs().max(), name


def test_no_tensor_of_the_stacks_size_is_made():
    ours, theirs = built("gpt_oss")
    size = STACKED * WIDTH * INNER

    def made(wrapper):
        class Watching(torch.overrides.TorchFunctionMode):
            largest = 0

            def __torch_function__(self, function, types, args=(), kwargs=None):
                out = function(*args, **(kwargs or {}))
                kept = getattr(out, "requires_grad", False)
                if isinstance(out, torch.Tensor) and kept and not out._is_view():
                    Watching.largest = max(Watching.largest, out.numel())
                return out

        with Watching():
            wrapper(*inputs(tokens=4))
        return Watching.largest

    assert made(ours) < size <= made(theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiler_follows_it_in_one_piece():
    """Grouped products compile in 16 bits alone; on CPUs a build of it takes a minute."""
    on_gpu = torch.cuda.is_available()
    ours, theirs = (wrapper.to("cuda" if on_gpu else "cpu") for wrapper in built("gpt_oss"))
    expected = results(theirs)
    torch._dynamo.reset()
    ours.to(torch.bfloat16).forward = torch.compile(
        ours.forward, fullgraph=True, backend="inductor" if on_gpu else "aot_eager"
    )
    assert_near(results(ours, torch.bfloat16), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_layers_share_their_compiled_programs():
    """Else every layer is compiled anew, and 36 of them are more programs than are kept."""

    def programs(layers):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = with_adapters("gpt_oss", layers=layers).to(torch.bfloat16)
        assert experts.attach(model)
        for layer in model.get_decoder().layers:
            layer.mlp.forward = torch.compile(layer.mlp.forward, fullgraph=True, backend="eager")
            layer.mlp(inputs(torch.bfloat16)[0][None])
        return compiled_graphs()

    assert programs(4) == programs(2) == 1


def test_a_torch_without_grouped_products_keeps_pefts_way(monkeypatch):
    _, theirs = built("gpt_oss")
    monkeypatch.delattr(functional, "grouped_mm")
    assert not experts.attach(theirs)
    assert type(theirs) is ParamWrapper


def assert_near(found, expected):
    """As near as 16 bits allow."""
    for name, value in expected.items():
        apart = (found[name].float() - value).norm() / value.norm()
        assert apart < 0.03, (name, apart)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rank", [8, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_the_gpus_products_are_those_of_peft(kind, rank):
    ours, theirs = (wrapper.cuda() for wrapper in built(kind, rank))
    expected = results(theirs)
    assert_near(results(ours.to(torch.bfloat16), torch.bfloat16), expected)
