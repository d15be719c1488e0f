"""8-bit products, emulated on a CPU: names, what is saved, and that it trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tunewright.training import fp8
from tunewright.training.base import find_base
from tunewright.training.batches import to_batch
from tunewright.training.model import build
from tunewright.training.optimizer import adamw, state_by_name
from tunewright.training.step import loss_sum

TORCHAO = Path(sys.prefix) / "fp8"  # where `make setup-all` puts it

pytestmark = [
    pytest.mark.skipif(not TORCHAO.is_dir(), reason="torchao: `make setup-all` installs it"),
    # Of torchao's own import: syntax and registrations that newer versions warn of.
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def made(alone, model_folder, settings, monkeypatch):
    monkeypatch.syspath_prepend(str(TORCHAO))

    def make(precision):
        chosen = settings(model_name=str(model_folder()), precision=precision, learning_rate=1e-2)
        return build(find_base(chosen), chosen, alone), chosen

    return make


def test_a_model_in_8_bits_has_the_names_and_shards_of_one_in_16(made):
    (eight, _), (sixteen, _) = made("fp8"), made("bf16")
    assert eight.tensors.keys() == sixteen.tensors.keys()
    for name, tensor in eight.tensors.items():
        assert type(tensor.to_local()) is torch.Tensor
        assert torch.equal(tensor.to_local(), sixteen.tensors[name].to_local())


def test_it_is_close_to_16_bits_and_no_more(made, packs):
    (eight, _), (sixteen, _) = made("fp8"), made("bf16")
    losses = [loss_sum(model, to_batch(packs)).item() for model in (eight, sixteen)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


def test_steps_lower_the_loss_and_change_what_is_saved(made, packs):
    model, chosen = made("fp8")
    optimizer = adamw(model.parameters, chosen)
    saved = {name: tensor.to_local().clone() for name, tensor in model.tensors.items()}
    losses = []
    for _ in range(4):
        losses.append(loss_sum(model, to_batch(packs)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        fp8.refresh_scales(model.module)
    assert losses[-1].item() < 0.8 * losses[0].item()
    assert all(not torch.equal(saved[n], t.to_local()) for n, t in model.tensors.items())
    states = state_by_name(model.parameters, optimizer).values()
    assert {type(s.to_local() if isinstance(s, DTensor) else s) for s in states} == {torch.Tensor}


def test_a_matrix_that_does_not_divide_among_the_ranks_stays(monkeypatch):
    monkeypatch.syspath_prepend(str(TORCHAO))
    from torchao.float8.float8_linear import Float8Linear

    with torch.device("meta"):
        layer = torch.nn.ModuleDict(
            {"even": torch.nn.Linear(32, 48), "odd": torch.nn.Linear(32, 32)}
        )
    fp8.convert(torch.nn.ModuleList([layer]), torch.device("cpu"), ranks=3)
    assert [type(layer[name]) for name in ("even", "odd")] == [Float8Linear, torch.nn.Linear]
