"""Saving beside training, in this process: what is on disk, what waits, and what goes wrong."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tunewright.contract import rundir
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import RunDir
from tunewright.training.base import BaseModel
from tunewright.training.checkpoint import Checkpoints, Progress
from tunewright.training.model import build
from tunewright.training.optimizer import adamw
from tunewright.training.staging import HostCopy

Make = Callable[..., Checkpoints]


@pytest.fixture
def make(alone, model_folder, settings, tmp_path) -> Make:
    """The checkpoints of a run of a small model; `change` makes its weights others."""

    def made(name: str = "run", **more) -> Checkpoints:
        run, base = RunDir(tmp_path / name), BaseModel("small", None, model_folder())
        asked = settings(model_name=str(base.folder), **more)
        model = build(base, asked, alone)
        optimizer = adamw(model.parameters, asked)
        return Checkpoints(run, alone, model, optimizer, base, {"data": "some"}, asked, None)

    return made


@pytest.fixture
def closed(monkeypatch) -> Iterator[threading.Event]:
    """Files are flushed, and folders made, only when this is set."""
    gate, flush, make_folder = threading.Event(), os.fsync, Path.mkdir

    def waiting_flush(descriptor):
        assert gate.wait(20)
        flush(descriptor)

    def waiting_mkdir(self, *args, **options):
        assert gate.wait(20)
        make_folder(self, *args, **options)

    monkeypatch.setattr(os, "fsync", waiting_flush)
    monkeypatch.setattr(Path, "mkdir", waiting_mkdir)
    yield gate
    gate.set()


def change(checkpoints: Checkpoints) -> None:
    for parameter in checkpoints.model.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    checkpoints.optimizer.step()


def values(checkpoints: Checkpoints) -> dict[str, torch.Tensor]:
    """Copies of weights and optimizer state."""
    found = {name: p.full_tensor() for name, p in checkpoints.model.parameters.items()}
    for name, parameter in checkpoints.model.parameters.items():
        for key, value in checkpoints.optimizer.state[parameter].items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = whole
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_training_goes_on_while_a_save_is_written(make, closed):
    checkpoints = make()
    checkpoints.begin(Progress(step=1), finished=False)
    change(checkpoints)
    assert checkpoints.poll() == []
    assert not checkpoints.run.checkpoint(1).exists()
    closed.set()
    [saved] = checkpoints.finish()
    assert (saved.step, saved.path) == (1, checkpoints.run.checkpoint(1))
    assert rundir.is_sealed(saved.path)
    assert 0 < saved.blocked < saved.seconds
    assert checkpoints.poll() == []


def test_what_is_written_is_the_state_at_its_beginning(make, closed):
    checkpoints = make()
    change(checkpoints)
    before = values(checkpoints)
    checkpoints.begin(Progress(step=1), finished=False)
    change(checkpoints)
    assert not same(before, values(checkpoints))
    closed.set()
    checkpoints.finish()
    again = make(seed=7)
    assert again.resume().progress.step == 1
    assert same(before, values(again))


def test_the_files_are_those_of_a_save_that_training_waits_for(make):
    beside, waiting = make("beside"), make("waiting")
    for checkpoints in (beside, waiting):
        change(checkpoints)
    beside.begin(Progress(step=1), finished=True)
    change(beside)
    [one], two = beside.finish(), waiting.save(Progress(step=1), finished=True)
    for name in ("__0_0.distcp", "hf/config.json"):
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()
    kept = [rundir.manifest(saved.path) for saved in (one, two)]
    for manifest in kept:
        manifest["files"].pop(".metadata")  # it holds its own path
    assert kept[0] == kept[1]
    assert rundir.damage(one.path, kept[0]) == []


def test_the_second_waits_for_the_first_and_both_are_told(make, closed):
    checkpoints = make(save_total_limit=2)
    checkpoints.begin(Progress(step=1), finished=False)
    threading.Timer(0.4, closed.set).start()
    blocked = checkpoints.begin(Progress(step=2), finished=False)
    assert blocked > 0.2
    assert rundir.is_sealed(checkpoints.run.checkpoint(1))
    assert [saved.step for saved in checkpoints.finish()] == [1, 2]


def test_the_memory_of_the_copy_is_used_again(make):
    checkpoints = make()
    checkpoints.save(Progress(step=1), finished=False)
    places = {name: t.data_ptr() for name, t in checkpoints._host.tensors.items()}
    change(checkpoints)
    checkpoints.save(Progress(step=2), finished=False)
    assert places == {name: t.data_ptr() for name, t in checkpoints._host.tensors.items()}


def test_an_empty_place_for_a_new_save_and_the_limit_of_old_ones(make):
    checkpoints = make(save_total_limit=2)
    torn = checkpoints.run.checkpoint(3)
    torn.mkdir(parents=True)
    (torn / "__5_0.distcp").write_text("left by an interrupted save of more ranks")
    for number in (1, 2, 3):
        checkpoints.save(Progress(step=number), finished=False)
    steps = [step for step, _ in rundir.sealed_checkpoints(checkpoints.run.checkpoints)]
    assert steps == [2, 3]
    assert not (torn / "__5_0.distcp").exists()


class TestWhatGoesWrong:
    @pytest.fixture
    def full_disk(self) -> Iterator[Callable[[], None]]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def test_a_full_disk_is_told_and_what_was_sealed_stays(self, make, full_disk):
        checkpoints = make(save_total_limit=1)
        checkpoints.save(Progress(step=1), finished=False)
        full_disk()
        checkpoints.begin(Progress(step=2), finished=False)
        assert checkpoints._current.wait(20)
        with pytest.raises(UserError, match=r"step-00000002: File too large; free some space"):
            checkpoints.poll()
        steps = [step for step, _ in rundir.sealed_checkpoints(checkpoints.run.checkpoints)]
        assert steps == [1]

    def test_a_place_that_cannot_be_written_is_told_at_the_next_begin(self, make):
        checkpoints = make()
        checkpoints.run.root.mkdir()
        checkpoints.run.checkpoints.write_text("a file in the way")
        checkpoints.begin(Progress(step=1), finished=False)
        with pytest.raises(UserError, match=r"cannot write the checkpoint .*Not a directory"):
            checkpoints.begin(Progress(step=2), finished=False)

    def test_an_error_of_the_training_does_not_wait_for_the_save(self, make, closed):
        begun = time.monotonic()
        checkpoints = make()
        checkpoints.begin(Progress(step=1), finished=False)
        with pytest.raises(KeyError), checkpoints:
            raise KeyError
        assert time.monotonic() - begun < 10
        closed.set()
        assert checkpoints._current.wait(20)
        assert not rundir.is_sealed(checkpoints.run.checkpoint(1))

    def test_leaving_without_an_error_waits_for_the_save(self, make, closed):
        with make() as checkpoints:
            checkpoints.begin(Progress(step=1), finished=False)
            threading.Timer(0.2, closed.set).start()
        assert rundir.is_sealed(checkpoints.run.checkpoint(1))


class TestResume:
    def test_a_damaged_one_is_passed_over(self, make, capsys):
        checkpoints = make(save_total_limit=3)
        checkpoints.save(Progress(step=1), finished=False)
        kept = values(checkpoints)
        change(checkpoints)
        checkpoints.save(Progress(step=2), finished=False)
        file = checkpoints.run.checkpoint(2) / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        again = make(save_total_limit=3)
        assert again.resume().progress.step == 1
        assert same(kept, values(again))
        assert "skipped a damaged checkpoint" in capsys.readouterr().out

    def test_the_same_number_of_ranks_has_no_caveat(self, make):
        make().save(Progress(step=1), finished=False)
        assert make().resume().caveat is None

    def test_another_cut_of_the_steps_is_told(self, make):
        make().save(Progress(step=1), finished=False)
        found = make(tokens_per_device=4096).resume()
        assert found.caveat.startswith("saved with tokens_per_device auto, now 4096: the same rows")


class TestConclude:
    def test_the_last_step_is_saved_once(self, make):
        checkpoints = make()
        assert [s.step for s in checkpoints.conclude(Progress(step=3))] == [3]
        assert checkpoints.conclude(Progress(step=3)) == []
        checkpoints.begin(Progress(step=4), finished=False)
        assert [s.step for s in checkpoints.conclude(Progress(step=5))] == [4, 5]

    def test_one_in_flight_for_this_step_is_enough(self, make):
        checkpoints = make()
        checkpoints.begin(Progress(step=4), finished=False)
        assert [s.step for s in checkpoints.conclude(Progress(step=4))] == [4]

    def test_what_was_resumed_is_not_saved_again(self, make):
        make().save(Progress(step=3), finished=False)
        again = make()
        again.resume()
        assert again.conclude(Progress(step=3)) == []


class TestSettle:
    @pytest.fixture
    def slow(self, monkeypatch) -> None:
        """A disk that takes 1.5 s for a checkpoint."""
        flush = os.fsync

        def sleeping(descriptor):
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("distcp"):
                time.sleep(1.5)
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", sleeping)

    def test_a_save_that_fits_is_waited_for(self, make, slow):
        checkpoints = make()
        checkpoints.begin(Progress(step=1), finished=False)
        told = checkpoints.settle(10)
        path = checkpoints.run.checkpoint(1)
        assert told == f"starting again goes on from step 1 ({path})"
        assert rundir.is_sealed(path)

    def test_one_that_is_known_not_to_fit_is_left_at_once(self, make, slow):
        checkpoints = make()
        checkpoints.save(Progress(step=1), finished=False)
        checkpoints.begin(Progress(step=2), finished=False)
        begun = time.monotonic()
        told = checkpoints.settle(1.0)
        assert time.monotonic() - begun < 0.9
        assert "the save of step 2 does not fit 1 s, about" in told
        assert "goes on from step 1" in told
        checkpoints.finish()

    def test_one_of_which_nothing_is_known_is_waited_for_so_long(self, make, slow):
        checkpoints = make()
        checkpoints.begin(Progress(step=1), finished=False)
        told = checkpoints.settle(0.3)
        assert told.startswith("the save of step 1 does not fit")
        assert told.endswith("no checkpoint is sealed, starting again begins at step 0")
        checkpoints.finish()

    def test_the_time_a_save_takes_is_guessed_then_measured(self, make, slow):
        checkpoints = make()
        state = sum(t.numel() * 4 for t in values(checkpoints).values())
        assert checkpoints.seconds == pytest.approx(state / 250e6)
        checkpoints.save(Progress(step=1), finished=False)
        assert 1.5 < checkpoints.seconds < 10
        checkpoints.begin(Progress(step=2), finished=False)
        assert checkpoints.seconds > 2.5  # what is left of this one, and then one more
        checkpoints.finish()


def test_a_host_copy_has_exactly_the_size_of_each_tensor():
    tensors = {
        "a": torch.arange(5.0),
        "b": torch.ones(3, 2, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "step": torch.tensor(3.0),
    }
    copy = HostCopy(tensors, torch.device("cpu"))
    copy.take(tensors)
    copy.wait()
    tensors["a"] += 1
    assert copy.tensors["a"].tolist() == [0, 1, 2, 3, 4]
    assert copy.bytes == 20 + 12 + 4
    for name, tensor in copy.tensors.items():
        assert tensor.shape == tensors[name].shape
        assert tensor.dtype == tensors[name].dtype
        assert tensor.untyped_storage().size() == tensor.nbytes
