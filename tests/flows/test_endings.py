"""Every ending of a run: what is left (no process), what is said, what goes on afterwards."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from tests.flows.cli import FEW_STEPS, TINY, events, processes_of, wait_for

pytestmark = pytest.mark.flow

STUBBORN = "trap '' TERM; (setsid bash -c \"trap '' TERM; sleep 600\" &); sleep 600 & wait"
ONE = {**FEW_STEPS, "compute.num_accelerators": 1}


def mlflow_states(home: Path) -> list[str]:
    store = sqlite3.connect(home / "mlflow.db")
    found = [state for (state,) in store.execute("select status from runs")]
    store.close()
    return found


def test_a_failing_command_is_launched_exactly_as_often_as_allowed(home, write) -> None:
    file = write("echo trying; exit 3", max_retries=2)
    found = home.run(file)
    assert found.code == 1
    assert found.facts["state"] == "Failed"
    assert [attempt["failure"]["class"] for attempt in found.facts["attempts"]] == ["unknown"] * 3
    (run,) = home.runs("own")
    assert sorted(p.name for p in (run / "logs").iterdir()) == [f"attempt-{n}" for n in (1, 2, 3)]
    assert "Traceback" not in found.narration
    assert mlflow_states(home.path) == ["FAILED"]


def test_what_cannot_succeed_is_not_tried_again(home) -> None:
    sets = {**ONE, "parameters.learning_rate": 1e30, "parameters.warmup_steps": 0}
    found = home.run(TINY, sets=sets)
    assert found.code == 1
    (attempt,) = found.facts["attempts"]
    assert attempt["failure"]["class"] == "nonfinite"
    assert found.facts["registered"] is None


def test_the_deadline_ends_every_process(home, write) -> None:
    """One node ends well when told to, the other not at all: the attempt is timed out."""
    polite = 'if [ "$NODE_RANK" = 0 ]; then trap "exit 0" TERM; sleep 600 & wait; fi\n'
    two = {"num_accelerators": 2, "accelerator_type": "GPU_1xH100"}
    file = write(polite + STUBBORN, timeout_minutes=1, compute=two)
    began = time.monotonic()
    found = home.run(file)
    assert found.code == 1
    assert (found.facts["state"], found.facts["stopped_by"]) == ("TimedOut", "timeout")
    (attempt,) = found.facts["attempts"]
    assert attempt["failure"]["class"] == "timeout"
    assert time.monotonic() - began < 140
    (run,) = home.runs("own")
    assert processes_of(str(run)) == []
    assert mlflow_states(home.path) == ["FAILED"]


def test_saved_near_the_deadline_is_timed_out_and_worth_another_attempt(home, write) -> None:
    """What a recipe does then: it leaves the class and where it goes on from, and ends."""
    facts = json.dumps({"class": "timeout", "rank": 0, "message": "step 7 is sealed"})
    leave = f"echo '{facts}' > $TUNEWRIGHT_FAILURE_DIR/rank-0.json; exit 1"
    command = f"test $TUNEWRIGHT_ATTEMPT = 3 || {{ {leave}; }}"
    file = write(command, timeout_minutes=5, max_retries=1)
    found = home.run(file)
    assert (found.code, found.facts["state"]) == (1, "TimedOut")
    assert found.facts["stopped_by"] == "timeout"
    assert [a["failure"]["class"] for a in found.facts["attempts"]] == ["timeout"] * 2
    expected = "attempt 2 ended before timeout_minutes: 5 was reached: step 7 is sealed"
    assert expected in found.facts["reason"]
    again = home.run(file)
    assert [a["failure"] is None for a in again.facts["attempts"]] == [False, False, True]
    assert again.facts["state"] == "Completed"


def test_ctrl_c_leaves_nothing_behind(home, write) -> None:
    file = write(f"echo ready\n{STUBBORN}")
    process = home.start("run", str(file), "--simulate", "--json")
    (run,) = wait_for(lambda: home.runs("own"))
    wait_for(lambda: "ready" in _log(run))
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)  # An impatient second one must not leave anything.
    out, narration = process.communicate(timeout=60)
    assert process.returncode == 130
    assert processes_of(str(run)) == []
    assert json.loads(out)["state"] == "Cancelled"
    (attempt,) = json.loads(out)["attempts"]
    assert (attempt["stopped_by"], attempt["failure"]) == ("interrupted", None)
    assert mlflow_states(home.path) == ["KILLED"]
    assert json.loads((run / "receipt.json").read_text())["state"] == "Cancelled"
    assert "Traceback" not in narration


def test_cancel_from_another_terminal(home, write, api) -> None:
    file = write("echo ready; sleep 600")
    process = home.start("run", str(file), "--simulate", "--json")
    (run,) = wait_for(lambda: home.runs("own"))
    wait_for(lambda: "ready" in _log(run))
    running = home.call("get", run.name, "--json")
    assert json.loads(running.stdout)["state"] == "Running"
    assert home.call("cancel", run.name).returncode == 0
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["state"]) == (130, "Cancelled")
    assert processes_of(str(run)) == []
    (flow_run,) = api("/flow_runs/filter", {"flow_runs": {"tags": {"all_": [f"run:{run.name}"]}}})
    assert flow_run["state_type"] == "CANCELLED"
    listed = home.call("list", "--json")
    assert run.name in [row["run"] for row in json.loads(listed.stdout)]
    assert "ready" in home.call("logs", run.name).stdout
    again = home.call("cancel", run.name)
    assert again.returncode == 1
    assert "nothing to cancel" in again.stderr


def test_cancel_while_waiting_for_another_attempt(home, write) -> None:
    process = home.start("run", str(write("exit 3", max_retries=1)), "--simulate", "--json")
    (run,) = wait_for(lambda: home.runs("own"))
    wait_for((run / "state" / "attempt-1" / "ended.json").exists)
    assert home.call("cancel", run.name).returncode == 0
    out, _ = process.communicate(timeout=60)
    facts = json.loads(out)
    assert (process.returncode, facts["state"], len(facts["attempts"])) == (130, "Cancelled", 1)


def test_mlflow_that_is_away_is_said_and_costs_no_attempt(home, write) -> None:
    found = home.run(write("true"), MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert found.code == 1
    assert found.facts["attempts"] == []
    assert found.facts["world_size"] is None
    assert "http://127.0.0.1:9 does not answer" in found.facts["reason"]


def test_a_changed_row_begins_a_new_run(home, tmp_path) -> None:
    """Continued after a failure, on rows that have changed: the old run is closed, and told."""
    rows = tmp_path / "rows.jsonl"
    demo = (TINY.parent / "demo.jsonl").read_text().splitlines(keepends=True)
    rows.write_text("".join(demo))
    sets = {**ONE, "parameters.dataset_name": str(rows), "max_retries": 0}
    process = home.start("run", str(TINY), "--simulate", "--json", *_sets(sets))
    run = _at_step(home, 1)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    rows.write_text("".join(demo[:-1]))
    found = home.run(TINY, sets=sets)
    assert found.code == 0, found.narration
    assert found.facts["run"] != run.name
    left = json.loads((run / "receipt.json").read_text())
    assert left["state"] == "Skipped"
    assert f"went on as {found.facts['run']}" in left["reason"]


@pytest.fixture(scope="module")
def undisturbed(prefect_server, tmp_path_factory) -> list[float]:
    """The losses of eight steps that nobody disturbs."""
    from tests.flows.cli import Home

    path = tmp_path_factory.mktemp("undisturbed")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    env = {**kept, "PREFECT_API_URL": prefect_server, "TUNEWRIGHT_HOME": str(path)}
    found = Home(path, env).run(TINY, sets=EIGHT)
    assert found.code == 0, found.narration
    return [event["loss"] for event in events(Path(found.facts["folder"]), 1, "step")]


EIGHT = {**ONE, "parameters.max_steps": 8, "parameters.global_batch_tokens": 4096}


def test_a_killed_rank_resumes_bit_for_bit(home, undisturbed) -> None:
    process = home.start("run", str(TINY), "--simulate", "--json", *_sets(EIGHT))
    run = _at_step(home, 4)
    for pid in _ranks(run):
        os.kill(pid, signal.SIGKILL)
    out, narration = process.communicate(timeout=200)
    assert process.returncode == 0, narration
    facts = json.loads(out)
    first, second = facts["attempts"]
    assert first["failure"]["class"] == "infrastructure"
    assert second["resumed_from_step"] == 3
    assert "attempt 2 resumes from step 3" in narration
    later = [event["loss"] for event in events(run, 2, "step")]
    assert later == undisturbed[3:]
    assert facts["registered"]["version"] == 1


def test_a_killed_flow_goes_on_to_one_version(home, undisturbed) -> None:
    process = home.start("run", str(TINY), "--simulate", "--json", *_sets(EIGHT))
    run = _at_step(home, 4)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not processes_of(str(run)), 30)
    wait_for(lambda: mlflow_states(home.path) == ["KILLED"], 30)
    found = home.run(TINY, sets=EIGHT)
    assert found.code == 0, found.narration
    assert found.facts["run"] == run.name
    assert f"continuing unfinished run {run.name}" in found.narration
    assert [event["loss"] for event in events(run, 2, "step")] == undisturbed[3:]
    assert found.facts["registered"]["version"] == 1
    assert mlflow_states(home.path) == ["FINISHED"]
    store = sqlite3.connect(home.path / "mlflow.db")
    assert store.execute("select count(*) from model_versions").fetchone() == (1,)
    store.close()


def test_no_value_of_a_secret_is_stored_anywhere(home, write, prefect_server, api) -> None:
    value = "hf_Zx9+/Secret Value~7"
    script = (
        "echo before; echo token: $MY_TOKEN; env | sort\n"
        "python -c \"import os, urllib.parse as u, base64 as b; t = os.environ['MY_TOKEN'];"
        "print(u.quote(t), b.b64encode(t.encode()).decode(), b.b64encode(b'user:' + t.encode()));"
        'print(dict(os.environ)); raise RuntimeError(t)"'
    )
    file = write(script, secrets={"MY_TOKEN": "scope/key"}, max_retries=0)
    found = home.run(file, MY_TOKEN=value)
    assert found.code == 1
    (run,) = home.runs("own")
    log = _log(run)
    assert "before" in log
    assert "token: ********" in log
    assert "RuntimeError: ********" in log
    time.sleep(3)  # Prefect hands its log lines over in batches.
    (flow_run,) = api("/flow_runs/filter", {"flow_runs": {"tags": {"all_": [f"run:{run.name}"]}}})
    lines = api("/logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}})
    assert any("token: ********" in line["message"] for line in lines)
    prefect_home = Path(os.environ["PREFECT_HOME"])
    for form in (value, "hf_Zx9%2B/Secret%20Value~7", "aGZfWng5Ky9TZWNyZXQgVmFsdWV+Nw"):
        said = [found.narration, json.dumps(found.facts), json.dumps([flow_run, lines])]
        assert not [text for text in said if form in text]
        for folder in (home.path, prefect_home):
            assert _holding(folder, form.encode()) == []


def _holding(folder: Path, needle: bytes) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if needle in path.read_bytes()]


def _log(run: Path) -> str:
    path = run / "logs" / "attempt-1" / "node-0.log"
    return path.read_text() if path.exists() else ""


def _sets(values: dict) -> list[str]:
    return [f"--set={key}={value}" for key, value in values.items()]


def _at_step(home, step: int) -> Path:
    """The run's folder once its first attempt has done that many steps."""
    (run,) = wait_for(lambda: home.runs("tiny"))
    wait_for(lambda: len(events(run, 1, "step")) >= step)
    return run


def _ranks(run: Path) -> list[int]:
    """Pids of the recipe's ranks: what torchrun gave a RANK."""
    return [
        pid
        for pid in processes_of(str(run))
        if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    ]
