"""`@distributed` and `@ray_launch`: functions on ranks, what they give back, and every ending."""

from __future__ import annotations

import io
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tunewright import distributed, ray_launch
from tunewright.contract.failures import UserError
from tunewright.notebook import RankError
from tunewright.notebook.accelerators import place
from tunewright.notebook.call import MARK
from tunewright.notebook.logs import RankLog
from tunewright.notebook.sending import packed_exception, unpacked

on_cpu = distributed(gpus=2, gpu_type="H100", simulate=True)
alone = distributed(num_accelerators=1, simulate=True)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TUNEWRIGHT_SIMULATE", raising=False)


def processes_of(caller: int) -> list[int]:
    """The live processes of every call that this process made."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK, "")
            if mark.startswith(f"{caller}-") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.rank
def test_ranks_return_what_they_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, into a stdout that is no file, inside an outer job, with a closure."""
    outside = {"RANK": "7", "WORLD_SIZE": "8", "NODE_RANK": "3", "TORCHELASTIC_TIMER_FILE": "outer"}
    for name, value in (outside | {"MY_SETTING": "kept"}).items():
        monkeypatch.setenv(name, value)
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    factor = 10

    class Made:
        def __init__(self, **parts: Any) -> None:
            self.parts = parts

    @on_cpu
    def work(start: int, *, step: int) -> Made:
        """Adds over the ranks."""
        import os
        import sys

        import torch
        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        print(f"é from {rank}")
        print("to stderr", file=sys.stderr)
        os.system("echo from a child")
        dist.destroy_process_group()
        names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MY_SETTING")
        env = [os.environ[name] for name in names]
        assert not {"NODE_RANK", "TORCHELASTIC_TIMER_FILE"} & os.environ.keys()
        return Made(number=start + step * rank * factor, total=total.item(), env=env)

    found: list[Made] = []
    monkeypatch.setattr(sys, "stdout", shown)
    thread = threading.Thread(target=lambda: found.extend(work.distributed(1, step=2)))
    thread.start()
    thread.join()

    assert work.__doc__ == "Adds over the ranks."
    assert [type(made) for made in found] == [Made, Made]
    assert [made.parts["number"] for made in found] == [1, 21]
    assert [made.parts["total"] for made in found] == [3.0, 3.0]
    for rank, made in enumerate(found):
        assert made.parts["env"] == [str(rank), "2", "2", "127.0.0.1", "kept"]
    lines = shown.buffer.getvalue().decode("ascii").splitlines()
    for rank in range(2):
        said = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        wanted = [f"? from {rank}", "to stderr", "from a child"]
        assert said == [f"[rank {rank}] {text}" for text in wanted]
    assert not processes_of(os.getpid())


@pytest.mark.rank
def test_the_exception_of_the_first_failed_rank_is_raised() -> None:
    """It is the user's own, from a cell that is no file; the waiting rank is ended."""
    cell = """
class Own(Exception):
    def __init__(self, first, second):
        super().__init__("no luck")
        self.second = second

def work():
    import os, time
    if os.environ["RANK"] == "1":
        raise Own(1, 2)  # the line
    time.sleep(600)
"""
    linecache.cache["<cell 3>"] = (len(cell), None, cell.splitlines(True), "<cell 3>")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(cell, "<cell 3>", "exec"), names)
    with pytest.raises(names["Own"], match="no luck") as caught:
        on_cpu(names["work"]).distributed()
    assert caught.value.second == 2
    assert caught.value.__notes__ == ["raised on rank 1 of 2; the other ranks were ended"]
    cause = str(caught.value.__cause__)
    assert "on rank 1 of 2:\n" in cause
    assert 'File "<cell 3>", line 10, in work\n    raise Own(1, 2)  # the line' in cause
    assert "rank.py" not in cause
    assert not processes_of(os.getpid())


@pytest.mark.rank
def test_a_killed_rank_is_named_though_others_raise_for_it(tmp_path: Path) -> None:
    """The launcher is held until it sees both at once, as when a collective breaks."""

    def work(there: Path) -> None:
        import os
        import signal
        import subprocess
        import time

        launcher = os.getppid()
        if os.environ["RANK"] == "1":
            os.kill(launcher, signal.SIGSTOP)
            there.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while not there.exists():
            time.sleep(0.01)
        go_on = ["sh", "-c", f"sleep 1; kill -CONT {launcher}"]
        subprocess.Popen(go_on, start_new_session=True)
        raise RuntimeError("connection closed by peer")

    with pytest.raises(RankError, match="rank 1 of 2 was ended by SIGKILL before work returned"):
        on_cpu(work).distributed(tmp_path / "there")
    assert not processes_of(os.getpid())


def bad_endings() -> list[tuple[Callable[[], Any], type[Exception], str]]:
    """Inside a function they go to the rank by value, which then need not import this file."""

    def leaves() -> None:
        import sys

        sys.exit(3)

    def kills_its_process() -> None:
        import os

        os._exit(5)

    def gives_a_generator() -> Any:
        return (letter for letter in "abc")

    def hangs_after_its_error() -> None:
        import threading
        import time

        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("and yet a thread runs")

    return [
        (leaves, RankError, "rank 0 of 1 failed: SystemExit: 3"),
        (kills_its_process, RankError, "rank 0 of 1 exited with code 5 before kills_its_process"),
        (gives_a_generator, UserError, r"what rank 0 returned \(a generator\) cannot be sent back"),
        (hangs_after_its_error, ValueError, "and yet a thread runs"),
    ]


@pytest.mark.rank
@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [pytest.param(*ending, id=ending[0].__name__) for ending in bad_endings()],
)
def test_other_endings_are_said(
    function: Callable[[], Any],
    kind: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tunewright.contract.processes.GRACE_S", 1.0)
    with pytest.raises(kind, match=message):
        alone(function).distributed()
    assert not processes_of(os.getpid())


@pytest.mark.rank
def test_a_result_is_not_lost_by_a_bad_end_after_it(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> list[int]:
        import atexit
        import os
        import sys

        atexit.register(os._exit, 4)
        sys.stdout.write("no line end")
        return [1, 2]

    assert alone(work).distributed() == [[1, 2]]
    said = capfd.readouterr()
    assert said.out == "[rank 0] no line end\n"
    assert "work: every rank returned, then one did not end well" in said.err


@pytest.mark.rank
def test_a_time_limit_ends_the_ranks() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"sleep did not end within 0.5 s; its 2 ranks are gone"):
        on_cpu(time.sleep).with_overrides(timeout=0.5).distributed(600)
    assert time.monotonic() - begun < 30
    assert not processes_of(os.getpid())


SCRIPT = """
from tunewright import distributed
@distributed(gpus=2, simulate=True)
def work():
    import os, subprocess, time
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    print("ready", os.getpid(), child.pid, flush=True)
    time.sleep(600)

work.distributed()
"""


@pytest.mark.rank
@pytest.mark.parametrize("ending", ["interrupt", "kill the caller", "kill the guardian"])
def test_nothing_outlives_the_caller(ending: str, tmp_path: Path) -> None:
    """From `python -c` or an interactive console; the ranks have started daemons of their own."""
    words = ["-i", "-q"] if ending == "kill the caller" else ["-c", SCRIPT]
    caller = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A killed caller cannot clear its folder away.
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # Tests started in the background of a shell inherit an ignored Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with caller:
        assert caller.stdin is not None
        if ending == "kill the caller":
            caller.stdin.write(SCRIPT)
            caller.stdin.flush()
        pids = ready(caller, ranks=2)
        assert all(psutil.pid_exists(pid) for pid in pids)
        if ending == "interrupt":
            os.killpg(caller.pid, signal.SIGINT)
        elif ending == "kill the caller":
            caller.kill()
        else:
            guardian = psutil.Process(caller.pid).children()[0]
            guardian.kill()
        _, said = caller.communicate(timeout=60)
    end = time.monotonic() + 20
    while (left := [p for p in pids if alive(p)] + processes_of(caller.pid)) and (
        time.monotonic() < end
    ):
        time.sleep(0.05)
    assert not left
    if ending == "interrupt":
        assert said.rstrip().endswith("KeyboardInterrupt")
    elif ending == "kill the guardian":
        assert "work ended before its 2 ranks had returned: its guardian was killed" in said


def ready(caller: subprocess.Popen[str], ranks: int) -> list[int]:
    """The pids that the ranks print when they run, shown while they run."""
    assert caller.stdout is not None
    pids: list[int] = []
    while len(pids) < 2 * ranks:
        line = caller.stdout.readline()
        assert line, caller.communicate()
        prefix, _, rest = line.partition("] ready ")
        if rest:
            assert prefix.startswith("[rank ")
            pids += map(int, rest.split())
    return pids


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.mark.rank
def test_ray_runs_on_rank_0_with_a_gpu_for_each_rank() -> None:
    pytest.importorskip("ray")
    base = 40

    @ray_launch(gpus=2, simulate=True)
    def work(more: int) -> tuple[float, int]:
        import ray

        @ray.remote(num_gpus=1)
        def add(number: int) -> int:
            return base + number

        total: int = ray.get(add.remote(more))
        return ray.cluster_resources()["GPU"], total

    assert work.distributed(2) == [(2.0, 42), None]
    assert not processes_of(os.getpid())


def test_what_cannot_run_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    @distributed(gpus=8, gpu_type="H100")
    def train() -> None:
        raise AssertionError("it must not run here")

    def refusal(of: Callable[[], Any]) -> str:
        with pytest.raises(UserError) as caught:
            of()
        return str(caught.value)

    said = refusal(train)
    assert "train.distributed(...)" in said
    assert "train.func(...)" in said
    said = refusal(train.distributed)
    assert "train asks for 8 GPUs (H100) and this machine has 0" in said
    assert "simulate=True" in said
    assert "TUNEWRIGHT_SIMULATE=1" in said
    monkeypatch.setenv("TUNEWRIGHT_SIMULATE", "1")
    assert "has 0" in refusal(train.with_overrides(simulate=False).distributed)
    assert "tunewright run FILE --target" in refusal(train.with_overrides(remote=True).distributed)
    on_ray = ray_launch(gpus=8, gpu_type="H100", remote=True)(train.func)
    assert "tunewright run FILE --target" in refusal(on_ray.distributed)
    lock = threading.Lock()
    assert "cannot pickle '_thread.lock'" in refusal(lambda: alone(print).distributed(lock))
    assert "needs its brackets" in refusal(lambda: distributed(train.func))
    both = refusal(lambda: distributed(num_accelerators=2, gpus=4))
    assert "num_accelerators=2 and its older name gpus=4 disagree" in both
    assert "num_accelerators is 0" in refusal(lambda: distributed(gpus=0))
    assert "timeout is -1" in refusal(lambda: distributed(gpus=1, timeout=-1))
    assert "gpuz is no setting" in refusal(lambda: train.with_overrides(gpuz=1))
    for name, value in {"remote": "false", "simulate": "no", "accelerator_type": 8}.items():
        wrong: Any = {name: value}
        assert f"{name} is {value!r}; it must be" in refusal(lambda: distributed(2, **wrong))  # noqa: B023
        assert f"{name} is {value!r}; it must be" in refusal(lambda: ray_launch(2, **wrong))  # noqa: B023
    no_function: Any = "train"
    assert "'train' is none" in refusal(lambda: distributed(gpus=1)(no_function))
    assert "'train' is none" in refusal(lambda: ray_launch(gpus=1)(no_function))
    assert "does not say how many" in refusal(distributed(simulate=True)(print).distributed)


def test_gpus_are_shared_out_as_they_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        '#!/bin/sh\ncase "$1" in *name) printf "NVIDIA H200\\nNVIDIA H200\\n";; '
        '*) printf "0\\n1\\n";; esac\n'
    )
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert place("train", None, "h200", False).gpus == ("0", "1")
    assert place("train", 1, "GPU_1xH200", True).note is None
    note = "H100 was asked for; the GPUs of this machine are NVIDIA H200"
    assert place("train", 2, "H100", False).note == note
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-4a, 7,-1,2")
    few = place("train", 2, None, True)
    assert few.environment() == {"CUDA_VISIBLE_DEVICES": "GPU-4a,7", "OMP_NUM_THREADS": "3"}
    many = place("train", 3, "H100", True)
    assert many.note == "simulating 3 GPUs (H100) by 3 processes on CPUs"
    assert many.environment()["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(UserError, match=r"asks for 3 GPUs \(H100\) and this machine has 2"):
        place("train", 3, "H100", False)


def test_importing_is_light() -> None:
    code = (
        "import sys, tunewright\n"
        "assert 'psutil' not in sys.modules\n"
        "from tunewright import distributed, ray_launch\n"
        "assert distributed(gpus=1)(print).func is print\n"
        "heavy = {'torch', 'ray', 'prefect', 'cloudpickle', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'distributed' in dir(tunewright) and not hasattr(tunewright, 'nothing')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_exceptions_come_back_as_what_they_are() -> None:
    class Locked(Exception):
        def __init__(self, name: str, *, lock: Any) -> None:
            super().__init__(name)
            self.lock = lock

    def back(error: BaseException) -> Any:
        content = packed_exception(error)
        return None if content is None else unpacked(content)

    assert isinstance(back(Locked("stuck", lock=threading.Lock())), Locked)
    assert str(back(Locked("stuck", lock=None))) == "stuck"
    assert back(Locked("stuck", lock=4)).lock == 4
    missing = back(FileNotFoundError(2, "No such file", "rows.json"))
    assert (missing.errno, missing.filename) == (2, "rows.json")
    assert back(KeyboardInterrupt()) is None


def test_logs_show_whole_lines_and_the_newest_state_of_a_bar(tmp_path: Path) -> None:
    now = 100.0
    path = tmp_path / "log"
    log = RankLog(path, 3, clock=lambda: now)

    def after(content: bytes, ended: bool = False) -> list[str]:
        with path.open("ab") as file:
            file.write(content)
        return list(log.lines(ended=ended))

    assert list(log.lines()) == []
    assert after(b"one\r\ntw") == ["[rank 3] one"]
    assert after(b"o\n\nthr\xff\n") == ["[rank 3] two", "[rank 3] ", "[rank 3] thr\ufffd"]
    assert after(b"\r 10%\r 20%\r 3") == []
    now += 6
    assert after(b"") == ["[rank 3]  20%"]
    assert after(b"0%\r 40%\r") == []
    assert after(b" 100%\n") == ["[rank 3]  100%"]
    assert [len(line) for line in after(b"x" * 200_000)] == [200_009]
    assert after(b"end", ended=True) == ["[rank 3] end"]
    assert after(b"", ended=True) == []
