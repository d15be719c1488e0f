"""One run from its first moment to its receipt: folder, lock, MLflow run, facts, ending."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks import attempts, requirements, snapshot, ui, volumes
from tasks.choose import Chosen, choose, code_of_tunewright
from tasks.targets import target_named
from tasks.tracker import Tracker, TrackingFailed
from tunewright.contract.failures import TunewrightError
from tunewright.contract.receipt import FINISHED
from tunewright.contract.rundir import home, read_json, write_json, write_text
from tunewright.contract.scrub import Scrubber
from tunewright.contract.workload import Workload

ASK_PREFECT_S = 3.0
MLFLOW_STATUS = {
    "Completed": "FINISHED",
    "Skipped": "FINISHED",
    "Failed": "FAILED",
    "TimedOut": "FAILED",
    "Cancelled": "KILLED",
    "Crashed": "KILLED",
}


class Cancelled(TunewrightError):
    """Someone asked for the end of the run, and it ended in order."""

    retryable = False


class TimedOut(TunewrightError):
    """The deadline of an attempt was reached, and no attempt is left."""

    failure_class = "timeout"


@dataclass(frozen=True)
class Options:
    """Where and how a workload runs: the flow's parameters."""

    target: str = "local"
    register_as: str | None = None
    simulate: bool = False
    procs_per_node: int | None = None
    tokens: str = "auto"
    resume: str | None = None
    fresh: bool = False


class Run:
    """A run in the making. Steps read its folder and add to its facts."""

    def __init__(self, workload: Workload, options: Options, folder: Path) -> None:
        """`folder` is that of the workload file: whose commit the run is traced to."""
        self.workload = workload
        self.folder = folder
        self.options = options
        self.target = target_named(options.target)
        self.placement = self.target.place(
            workload, simulate=options.simulate, procs_per_node=options.procs_per_node
        )
        self.notes = self._look()
        self.seconds: dict[str, float] = {}
        self.data: dict[str, Any] | None = None
        self.registered: dict[str, Any] | None = None
        self.reason: str | None = None
        self.stopped_by: str | None = None
        self.exit_code = 0
        self.receipt: dict[str, Any] = {}
        self.scrubber = Scrubber({})
        self._began = self._asked = time.monotonic()
        self.code = snapshot.snapshot(workload.code_source) if workload.code_source else None
        self._enter(self._choose(fresh=options.fresh, resume=options.resume))

    def _look(self) -> list[str]:
        """Notes on the way, and refusals, before anything is written."""
        notes = [*self.workload.warnings(), *volumes.notes(self.workload)]
        notes += requirements.check(self.workload)
        notes += [self.placement.note] if self.placement.note else []
        interface = self.target.interface_note(self.workload.env_variables)
        return [*notes, *([interface] if interface else [])]

    def _choose(self, *, fresh: bool, resume: str | None) -> Chosen:
        code = {
            "tunewright": code_of_tunewright(),
            "snapshot": self.code.sha256 if self.code else None,
        }
        identity = {"workload_sha256": self.workload.sha256, "code": code}
        root = volumes.output_root(self.workload)
        name = self.workload.experiment_name
        return choose(root, name, identity, fresh=fresh, resume=resume, say=ui.say)

    def _enter(self, chosen: Chosen) -> None:
        self.dir, self.lock = chosen.dir, chosen.lock
        ui.announce(self.name)
        ui.say(f"{chosen.note} in {self.dir.root}")
        document = yaml.safe_dump(self.workload.document(), sort_keys=False, allow_unicode=True)
        write_text(self.dir.workload, document)
        flow_run = ui.flow_run_id()
        index = {"folder": str(self.dir.root), "flow_run_id": str(flow_run) if flow_run else None}
        write_json(home() / "runs" / self.name, index)
        self.dir.cancel_request.unlink(missing_ok=True)
        self.tracker = Tracker(self._opening(), without=self.workload.secrets)

    def begin_anew(self, why: str) -> None:
        """Leave this run as it is and go on in a new folder."""
        ui.say(f"{why}: beginning a new run")
        self._leave_mlflow("KILLED")
        self.lock.release()
        self._enter(self._choose(fresh=True, resume=None))

    @property
    def name(self) -> str:
        return self.dir.name

    def code_folder(self) -> Path | None:
        """The unpacked snapshot; None when the workload has no code_source."""
        if self.code is None:
            return None
        # By its hash: a resumed run whose code has changed gets the new one.
        return snapshot.unpack(self.code, self.dir.code / self.code.sha256[:12])

    def mlflow(self) -> dict[str, str]:
        """MLFLOW_RUN_ID and MLFLOW_TRACKING_URI, once the run is open."""
        opened = self.tracker.run
        if not self.dir.mlflow.exists():
            write_json(self.dir.mlflow, opened)
        return {"MLFLOW_RUN_ID": opened["run_id"], "MLFLOW_TRACKING_URI": opened["tracking_uri"]}

    def mlflow_if_open(self) -> dict[str, str]:
        """The same when the run is open already, so that nobody waits for it."""
        return self.mlflow() if self.tracker.opened else {}

    def is_cancelled(self) -> bool:
        """Whether someone asked for the end of this run: by its folder, or through Prefect."""
        if self.dir.cancel_request.exists():
            return True
        now = time.monotonic()
        if now - self._asked < ASK_PREFECT_S:
            return False
        self._asked = now
        return ui.is_cancelling()

    def reason_to_stop(self) -> str | None:
        return "cancel" if self.is_cancelled() else None

    def raise_if_cancelled(self) -> None:
        if self.dir.cancel_request.exists() or ui.is_cancelling():
            raise Cancelled("cancelled on request; its processes are ended")

    def tags(self) -> dict[str, str]:
        """What a model version is traced by."""
        commit, dirty = self._commit()
        found = {
            "tunewright.run": self.name,
            "tunewright.workload": self.workload.experiment_name,
            "tunewright.workload_sha256": self.workload.sha256,
            "tunewright.data_fingerprint": (self.data or {}).get("fingerprint"),
            "tunewright.commit": commit,
            "tunewright.dirty": str(dirty).lower() if commit else None,
        }
        return {key: str(value) for key, value in found.items() if value is not None}

    def end(self, state: str, reason: str | None = None, exit_code: int = 1) -> None:
        """Write the receipt, finish the MLflow run, give the folder free."""
        self.exit_code = 0 if state in FINISHED else exit_code
        self.seconds["total"] = time.monotonic() - self._began
        self.receipt = self._receipt(state, reason)
        try:
            write_json(self.dir.receipt, self.receipt)
            artifacts = [str(self.dir.receipt)]
            self._leave_mlflow(MLFLOW_STATUS[state], artifacts=artifacts, tags=self.tags())
            ui.publish(self.receipt)
        finally:
            self.lock.release()

    def _receipt(self, state: str, reason: str | None) -> dict[str, Any]:
        tried, facts = attempts.of_run(self.dir)
        commit, dirty = self._commit()
        name, digest = self.workload.experiment_name, self.workload.sha256
        placed = self.placement.nodes * self.placement.procs_per_node
        return {
            "run": self.name,
            "state": state,
            "stopped_by": self.stopped_by,
            "reason": self.scrubber.text(reason) if reason else self.reason,
            "folder": str(self.dir.root),
            "workload": {"name": name, "sha256": digest, "commit": commit, "dirty": dirty},
            "data": self.data,
            "nodes": self.placement.nodes,
            **facts,
            "world_size": facts["world_size"] or placed,
            "attempts": tried,
            "seconds": {step: round(s, 3) for step, s in self.seconds.items()},
            "registered": self.registered,
            "mlflow": self.tracker.opened,
        }

    def _leave_mlflow(self, status: str, **parts: Any) -> None:
        """The final status is ours to write; an MLflow that is away does not undo the run."""
        try:
            self.tracker.finish(status, **parts)
        except TrackingFailed as error:
            ui.say(f"the MLflow run could not be set to {status}: {error}")

    def _commit(self) -> tuple[str | None, bool]:
        return snapshot.commit_of(self.code.root if self.code else self.folder)

    def _opening(self) -> dict[str, Any]:
        known = read_json(self.dir.mlflow) or {}
        return {
            "experiment": self.workload.experiment_name,
            "run_name": self.workload.mlflow_run_name or self.workload.experiment_name,
            "run_id": known.get("run_id"),
            "tags": self.tags(),
            "params": {},
            "artifact_location": None,
        }


@contextmanager
def opened(
    source: Path | str | Mapping[str, Any], overrides: Mapping[str, Any], options: Options
) -> Iterator[Run]:
    """A run that ends in every ending: receipt, MLflow status and lock are settled on the way out.

    An error for the reader is recorded and goes no further: `run.receipt` tells it.
    """
    folder = Path.cwd() if isinstance(source, Mapping) else Path(source).absolute().parent
    run = Run(Workload.load(source, overrides), options, folder)
    try:
        for note in [*run.notes, *(snapshot.notes(run.code) if run.code else [])]:
            ui.say(note)
        yield run
    except Cancelled as error:
        run.end("Cancelled", str(error))
    except TimedOut as error:
        run.end("TimedOut", str(error))
    except TunewrightError as error:
        run.end("Failed", str(error), error.exit_code)
    except OSError as error:
        run.end("Failed", sentence(error))
    except KeyboardInterrupt:
        run.end("Cancelled", "interrupted")
        raise
    except BaseException as error:
        # Prefect ends a flow by a signal; whether someone asked for it, its API knows.
        asked = _asked_to_cancel(run)
        run.end("Cancelled" if asked else "Crashed", f"{type(error).__name__}: {error}")
        raise
    else:
        run.end("Completed")


def sentence(error: OSError) -> str:
    """An operating system's error in one sentence for the reader."""
    place = f"{error.filename}: " if error.filename else ""
    hint = "; free some space and start again" if error.errno == errno.ENOSPC else ""
    return f"{place}{error.strerror or error}{hint}"


def _asked_to_cancel(run: Run) -> bool:
    with suppress(Exception):
        return run.dir.cancel_request.exists() or ui.is_cancelling()
    return False
