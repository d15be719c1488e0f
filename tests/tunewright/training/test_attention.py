from __future__ import annotations

import pytest
import torch

from tunewright.training.attention import VARLEN, choose
from tunewright.training.base import find_base
from tunewright.training.batches import Shape, to_batch
from tunewright.training.model import build
from tunewright.training.step import loss_sum

GPU = torch.device("cuda", 0)


def config_in(folder):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def test_the_kernel_is_for_16_bit_on_a_gpu(model_folder):
    config = config_in(model_folder())
    assert choose(config, GPU, torch.bfloat16) == VARLEN
    assert choose(config, GPU, torch.float32) is None
    assert choose(config, torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.parametrize("more", [{"head_dim": 512}, {"attention_dropout": 0.1}])
def test_what_the_kernel_cannot_do_keeps_the_mask(model_folder, more):
    assert choose(config_in(model_folder(**more)), GPU, torch.bfloat16) is None


def test_sinks_and_capped_scores_keep_an_attention_that_has_them(model_folder):
    sinks = config_in(model_folder("gpt_oss", num_local_experts=2, num_experts_per_tok=1))
    assert choose(sinks, GPU, torch.bfloat16) == "flex_attention"
    assert choose(sinks, torch.device("cpu"), torch.float32) is None
    assert choose(config_in(model_folder("gemma2")), GPU, torch.bfloat16) == "eager"


def test_the_plain_way_is_taken_where_it_is_asked_for(model_folder):
    config = config_in(model_folder())
    assert choose(config, GPU, torch.bfloat16, plain=True) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_fast_ways_and_the_plain_ones_give_the_same(kind, alone, model_folder, settings, packs):
    folder = model_folder(kind, head_dim=16, **({"sliding_window": 4} if kind == "mistral" else {}))
    found = []
    for plain in (False, True):
        chosen = settings(model_name=str(folder), precision="bf16", plain=plain)
        model = build(find_base(chosen), chosen, alone)
        assert (model.module.config._attn_implementation == VARLEN) is not plain
        loss = loss_sum(model, to_batch(packs, Shape(64, 128)).to(alone.device))
        loss.backward()
        gradients = [p.grad.full_tensor().flatten() for p in model.parameters.values()]
        found.append((loss.item(), torch.cat(gradients)))
    (fast, ours), (plain_loss, theirs) = found
    assert fast == pytest.approx(plain_loss, rel=1e-2)
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.999
