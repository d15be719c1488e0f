"""The whole model on every rank against the sharded one, which is held against transformers'."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.distributed.tensor import DTensor

from tunewright.training import weights
from tunewright.training.base import find_base
from tunewright.training.batches import Shape, to_batch
from tunewright.training.memory import Fit, adjusted
from tunewright.training.model import build, inference
from tunewright.training.replicas import replicate
from tunewright.training.step import loss_sum


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(model, batches):
    """Loss and gradients of micro-batches, as a step gathers them."""
    losses = []
    for place, batch in enumerate(batches):
        model.accumulate(last=place == len(batches) - 1)
        losses.append(loss_sum(model, batch))
        losses[-1].backward()
    return [sum(losses).detach(), *(whole(p.grad) for p in model.parameters.values())]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_its_weights_are_those_of_the_sharded_model(init, tied, alone, model_folder, settings):
    folder = model_folder("qwen2", tie_word_embeddings=tied)
    if init == "pretrained":
        from transformers import AutoConfig, AutoModelForCausalLM

        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    chosen = settings(model_name=str(folder), init=init)
    base = find_base(chosen)
    sharded, copied = build(base, chosen, alone), replicate(base, chosen, alone)
    assert copied.tied == sharded.tied
    assert (copied.count, copied.matmul_count) == (sharded.count, sharded.matmul_count)
    assert copied.tensors.keys() == sharded.tensors.keys()
    assert all(type(tensor) is torch.Tensor for tensor in copied.tensors.values())
    pairs = zip(copied.tensors.values(), sharded.tensors.values(), strict=True)
    assert all(torch.equal(one, whole(other)) for one, other in pairs)
    assert weights.saved_tensors(copied.module).keys() == copied.tensors.keys()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_its_loss_and_gradients_are_those_of_the_sharded_model(
    precision, recompute, alone, model_folder, settings, packs
):
    """In 16 bits too: products, residuals and head have the same type, sums over packs are fp32."""
    folder = model_folder("qwen2", tie_word_embeddings=True)
    chosen = settings(model_name=str(folder), precision=precision, gradient_checkpointing=recompute)
    base, batches = find_base(chosen), [to_batch([pack]) for pack in packs]
    copied = replicate(base, chosen, alone)
    assert copied.recomputes is recompute
    found = results(copied, batches)
    expected = results(build(base, chosen, alone), batches)
    assert {gradient.dtype for gradient in found} == {torch.float32}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_it_computes_with_weights_as_they_are_now(alone, model_folder, settings, packs):
    """Copies in 16 bits are made anew after the weights have changed, in training and beside it."""
    chosen = settings(model_name=str(model_folder()), precision="bf16")
    model = replicate(find_base(chosen), chosen, alone)
    batch = to_batch(packs)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.zero_()
    with inference(model):
        evaluated = loss_sum(model, batch).item()
    uniform = batch.supervised * torch.log(torch.tensor(64.0)).item()
    assert evaluated == pytest.approx(uniform, rel=1e-5)
    assert loss_sum(model, batch).item() == pytest.approx(uniform, rel=1e-5)


def test_nothing_is_gathered_for_it(alone, model_folder, settings):
    chosen = settings(model_name=str(model_folder()))
    model = replicate(find_base(chosen), chosen, alone)
    assert adjusted(model, Fit(1, False, True, "as set")) is model
    assert model.whole


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_give_the_same_loss_and_gradients(
    recompute, alone, model_folder, settings, packs
):
    found = []
    for compiled in (False, True):
        chosen = settings(
            model_name=str(model_folder()),
            precision="bf16",
            compile=compiled,
            gradient_checkpointing=recompute,
        )
        model = replicate(find_base(chosen), chosen, alone)
        shape = Shape(tokens=40, longest=16)
        found.append(results(model, [to_batch([pack], shape) for pack in packs]))
    # In 16 bits fused operations round at other places.
    for plain, fused in zip(*found, strict=True):
        assert (plain - fused).norm() <= 0.1 * plain.norm()
