"""The loss made in the head against the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tunewright.training.base import find_base
from tunewright.training.head import summed_loss
from tunewright.training.model import build


def both(dtype, chunk, bias=True, places=37):
    """Loss and gradients by the chunked way and by the plain one, of the same numbers."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(places, 16), torch.randn(50, 16)
    targets = torch.randint(0, 50, (places,))
    results = []
    for fused in (True, False):
        given = [hidden, weight] + ([torch.linspace(-1, 1, 50)] if bias else [])
        given = [t.to(dtype).requires_grad_() for t in given]
        if fused:
            loss = summed_loss(*given, *([] if bias else [None]), targets, chunk=chunk)
        else:
            loss = F.cross_entropy(F.linear(*given).float(), targets, reduction="sum")
        (loss * 0.25).backward()
        results.append([loss.detach(), *(t.grad for t in given)])
    return results


@pytest.mark.parametrize("chunk", [1, 8, 37, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_give_the_loss_and_gradients_of_one_product(chunk, bias):
    for ours, plain in zip(*both(torch.float32, chunk, bias), strict=True):
        assert (ours - plain).norm() <= 1e-6 * plain.norm()


def test_the_weights_gradient_of_many_chunks_is_as_close_in_bf16_as_that_of_one_product():
    exact = both(torch.float64, 512, places=512)[1][2]
    (_, _, ours, _), (_, _, plain, _) = both(torch.bfloat16, 4, places=512)
    # Summed up in bf16 over 128 chunks it would be several times as far away.
    assert (ours - exact).norm() <= 1.2 * (plain - exact).norm()


def test_without_labels_there_is_no_loss_and_a_gradient_of_zeros():
    (loss, to_hidden, to_weight, _), _ = both(torch.float32, 8, places=0)
    assert loss == 0
    assert to_hidden.shape == (0, 16)
    assert not to_weight.any()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_plain_head_makes_the_loss(kind, alone, model_folder, settings):
    chosen = settings(model_name=str(model_folder(kind, head_dim=8)))
    assert build(find_base(chosen), chosen, alone).head is not None
    chosen = settings(model_name=chosen.model_name, plain=True)
    assert build(find_base(chosen), chosen, alone).head is None


def test_a_model_that_caps_its_logits_keeps_its_own_head(alone, model_folder, settings):
    chosen = settings(model_name=str(model_folder("gemma2", head_dim=8)))
    assert build(find_base(chosen), chosen, alone).head is None
