"""Where time goes: phases, what counts for the speed, and what the hardware can do."""

from __future__ import annotations

import time

import pytest
import torch

from tunewright.training import ceiling
from tunewright.training.timing import Clock, Pace

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")


def test_phases_add_up_and_are_told_once():
    clock = Clock(CPU)
    for seconds in (0.02, 0.03):
        with clock.phase("data"):
            time.sleep(seconds)
    with clock.phase("optimizer"):
        time.sleep(0.01)
    found = clock.collect()
    assert found.keys() == {"data", "optimizer"}
    assert 0.05 <= found["data"] < 0.5
    assert 0.01 <= found["optimizer"] < 0.5
    assert clock.collect() == {}


def test_a_phase_that_ends_in_an_error_is_no_time_of_a_step():
    clock = Clock(CPU)
    with pytest.raises(KeyError), clock.phase("data"):
        raise KeyError
    assert clock.collect() == {}


@GPU
def test_on_a_gpu_phases_are_the_gpus_time_and_nobody_waits():
    clock = Clock(torch.device("cuda"))
    matrix = torch.randn(8192, 8192, device="cuda")
    matrix @ matrix  # the first one loads its library
    torch.cuda.synchronize()
    begun = time.perf_counter()
    with clock.phase("forward_backward"):
        for _ in range(10):
            matrix @ matrix
    with clock.phase("data"):
        time.sleep(0.01)
    asked = time.perf_counter() - begun
    assert clock.collect() == {}, "the GPU is still at it"
    found = clock.collect(wait=True)
    took = time.perf_counter() - begun
    assert asked < found["forward_backward"] <= took, "nothing waited for the GPU"
    assert found["data"] < 0.001, "the batch came while the GPU had work"
    with clock.phase("data"):
        time.sleep(0.02)
    assert 0.02 <= clock.collect(wait=True)["data"] < 0.1, "the GPU had nothing to do"


def test_the_first_step_and_traced_ones_do_not_count_for_the_speed():
    pace = Pace()
    phases = {"data": 0.25, "checkpoint": 0.5}
    counted = [
        pace.add(100, 9.0, phases, usual=True),
        pace.add(100, 1.0, phases, usual=True),
        pace.add(200, 1.0, phases, usual=True),
        pace.add(100, 7.0, phases, usual=False),
    ]
    assert counted == [False, True, True, False]
    assert pace.tokens_per_second() == 150
    assert pace.seconds == {"warm_up": 16.0, "data": 0.5, "checkpoint": 2.0}
    assert pace.left(10) == pytest.approx(10 * (1.0 + 2.0 / 4))


def test_a_step_in_which_something_was_compiled_does_not_count():
    """The first shape, and a second one, for which torch makes a graph of any size."""
    function = torch.compile(lambda x: (x * 2).sum(), backend="eager")
    pace = Pace()
    counted = []
    for length in (3, 3, 4, 5, 6):
        function(torch.ones(length))
        counted.append(pace.add(length, 1.0, {}, usual=True))
    assert counted == [False, True, False, True, True]


def test_steps_that_all_warm_up_give_the_speed_there_is():
    pace = Pace()
    assert pace.tokens_per_second() is None
    pace.add(100, 4.0, {}, usual=True)
    assert pace.tokens_per_second() == 25
    assert pace.left(3) is None


def test_the_ceiling_is_what_a_product_takes(alone):
    """Against products timed here; the machine may be busy with other work at any time."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    found = ceiling.measured(alone, torch.float32)
    assert torch.equal(torch.rand(1), expected), "no random number of the run has moved"
    size = ceiling.SIZES[alone.device.type]
    one = torch.randn(size, size, device=alone.device)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        float((one @ one)[0, 0])
        seconds.append(time.perf_counter() - begun)
    assert found == pytest.approx(2 * size**3 / min(seconds), rel=0.7)


def test_the_ceiling_takes_less_than_a_second():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begun = time.process_time()
    ceiling.matmul_flops(device, torch.float32)
    assert time.process_time() - begun < 1.0
