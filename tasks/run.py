"""One run from its first moment to its receipt: folder, lock, MLflow run, facts, ending."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks import attempts, requirements, snapshot, ui, volumes
from tasks.choose import Chosen, choose, code_of_tunewright
from tasks.targets import is_platform, target_named
from tasks.targets.guardian import undisturbed
from tasks.tracker import Tracker, TrackingFailed
from tunewright.contract.failures import TunewrightError, UserError
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
    stopped_by = "cancel"


class TimedOut(TunewrightError):
    """The deadline of an attempt was reached, and no attempt is left."""

    failure_class = "timeout"
    retryable = True
    stopped_by: str | None = "timeout"


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
        self.exit_code = 0
        self.receipt: dict[str, Any] = {}
        self.scrubber = Scrubber({})
        self._began = self._asked = time.monotonic()
        self._cancelled = False
        self.code = snapshot.snapshot(workload.code_source) if workload.code_source else None
        # Looked up once: what is committed while the run goes on is not what ran.
        self.commit = snapshot.commit_of(self.code or folder)
        self._hold(self._choose(fresh=options.fresh, resume=options.resume))

    def _look(self) -> list[str]:
        """Notes on the way, and refusals, before anything is written."""
        notes = self.workload.warnings()
        if is_platform(self.options.target):
            notes += self.target.notes_of(self.workload)
            self.target.check_name(self.options.register_as, self.workload)
        else:
            notes += [*volumes.notes(self.workload), *requirements.check(self.workload)]
        notes += [self.placement.note] if self.placement.note else []
        return [*notes, *self.target.notes(self.workload.env_variables)]

    def _choose(self, *, fresh: bool, resume: str | None) -> Chosen:
        code = {
            "tunewright": code_of_tunewright(),
            "snapshot": self.code.sha256 if self.code else None,
        }
        identity = {"workload_sha256": self.workload.sha256, "code": code}
        root = volumes.output_root(self.workload)
        name = self.workload.experiment_name
        return choose(root, name, identity, fresh=fresh, resume=resume, say=ui.say)

    def _hold(self, chosen: Chosen) -> None:
        self.dir, self.lock, self._note = chosen.dir, chosen.lock, chosen.note
        # A request from here on is for us; an older one was for whoever held the run before.
        self.dir.cancel_request.unlink(missing_ok=True)
        self.tracker = Tracker(self._opening(), without=self.workload.secrets)
        self.data = read_json(self.dir.tokens)
        self._before = (read_json(self.dir.receipt) or {}).get("seconds", {})

    def enter(self) -> None:
        """Make the run known, and write down what it is."""
        ui.announce(self.name)
        ui.say(f"{self._note} in {self.dir.root}")
        document = yaml.safe_dump(self.workload.document(), sort_keys=False, allow_unicode=True)
        write_text(self.dir.workload, document)
        flow_run = ui.flow_run_id()
        index = {"folder": str(self.dir.root), "flow_run_id": str(flow_run) if flow_run else None}
        write_json(home() / "runs" / self.name, index)

    def begin_anew(self, why: str) -> None:
        """Close this run as Skipped and go on in a new folder."""
        ui.say(f"{why}: beginning a new run")
        left, lock = self.dir, self.lock
        self._leave_mlflow("KILLED")
        chosen = self._choose(fresh=True, resume=None)
        reason = f"{why}; went on as {chosen.dir.name}"
        write_json(left.receipt, self._receipt("Skipped", reason))
        lock.release()
        self._hold(chosen)
        self.enter()

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

    def link_platform(self, attempt: int) -> None:
        """Tag our MLflow run with the one that the platform made for an attempt, and copy its
        metrics.
        """
        found = read_json(self.dir.platform(attempt, "mlflow"))
        if found is None:
            return
        tags = {f"tunewright.attempt_{attempt}.mlflow_run": found["url"]}
        history = read_json(self.dir.platform(attempt, "metrics")) or {}
        try:
            self.tracker.log(tags=tags, history=history)
        except (TrackingFailed, UserError) as error:
            ui.say(f"the platform's MLflow run could not be linked: {error}", logging.WARNING)

    def is_cancelled(self) -> bool:
        """Whether someone asked for the end of this run: by its folder, or through Prefect."""
        if self._cancelled or self.dir.cancel_request.exists():
            return True
        if time.monotonic() - self._asked > ASK_PREFECT_S:
            self._asked = time.monotonic()
            self._cancelled = ui.is_cancelling()
        return self._cancelled

    def reason_to_stop(self) -> str | None:
        return "cancel" if self.is_cancelled() else None

    def raise_if_cancelled(self) -> None:
        if self.is_cancelled():
            raise Cancelled("cancelled on request; its processes are ended")

    def tags(self) -> dict[str, str]:
        """What a model version is traced by."""
        commit, dirty = self.commit
        found = {
            "tunewright.run": self.name,
            "tunewright.workload": self.workload.experiment_name,
            "tunewright.workload_sha256": self.workload.sha256,
            "tunewright.data_fingerprint": (self.data or {}).get("fingerprint"),
            "tunewright.commit": commit,
            "tunewright.dirty": str(dirty).lower() if commit else None,
        }
        return {key: str(value) for key, value in found.items() if value is not None}

    def end(
        self, state: str, error: BaseException | None = None, reason: str | None = None
    ) -> None:
        """Write the receipt, finish the MLflow run, give the folder free: each, whatever fails."""
        self.exit_code = 0 if state in FINISHED else getattr(error, "exit_code", 1)
        self.seconds["total"] = time.monotonic() - self._began
        told = reason or (str(error) if error else None)
        stopped_by = getattr(error, "stopped_by", None)
        self.receipt = self._receipt(state, told, stopped_by)
        artifacts = [str(self.dir.receipt)]
        with undisturbed():
            try:
                write_json(self.dir.receipt, self.receipt)
            except OSError as away:
                artifacts = []
                ui.say(f"the receipt cannot be written: {sentence(away)}", logging.ERROR)
            if is_platform(self.options.target):
                self.target.keep_records(self.dir, ui.say)
            self._leave_mlflow(MLFLOW_STATUS[state], artifacts=artifacts, tags=self.tags())
            ui.publish(self.receipt)
            with suppress(OSError):
                self.lock.release()

    def _receipt(
        self, state: str, reason: str | None, stopped_by: str | None = None
    ) -> dict[str, Any]:
        tried, facts = attempts.of_run(self.dir)
        commit, dirty = self.commit
        name, digest = self.workload.experiment_name, self.workload.sha256
        ran = self.placement if tried else None
        return {
            "run": self.name,
            "state": state,
            "stopped_by": stopped_by,
            "reason": self.scrubber.text(reason) if reason else self.reason,
            "folder": str(self.dir.root),
            "workload": {"name": name, "sha256": digest, "commit": commit, "dirty": dirty},
            "data": self.data,
            "nodes": ran.nodes if ran else None,
            **facts,
            "world_size": facts["world_size"] or (ran.nodes * ran.procs_per_node if ran else None),
            "attempts": tried,
            "seconds": self._all_seconds(),
            "registered": self.registered,
            "mlflow": self.tracker.opened,
        }

    def _all_seconds(self) -> dict[str, float]:
        """Seconds of each step, over all starts of this run that left a receipt."""
        steps = [*self._before, *(step for step in self.seconds if step not in self._before)]
        both = ((s, self._before.get(s, 0.0) + self.seconds.get(s, 0.0)) for s in steps)
        return {step: round(seconds, 3) for step, seconds in both}

    def _leave_mlflow(self, status: str, **parts: Any) -> None:
        """The final status is ours to write; an MLflow that is away does not undo the run."""
        try:
            self.tracker.finish(status, **parts)
        except (TrackingFailed, UserError) as error:
            ui.say(f"the MLflow run could not be set to {status}: {error}", logging.ERROR)

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
        run.enter()
        for note in [*run.notes, *(snapshot.notes(run.code) if run.code else [])]:
            ui.say(note)
        yield run
    except Cancelled as error:
        run.end("Cancelled", error)
    except TimedOut as error:
        run.end("TimedOut", error)
    except TunewrightError as error:
        run.end("Failed", error)
    except OSError as error:
        run.end("Failed", error, sentence(error))
    except KeyboardInterrupt as error:
        run.end("Cancelled", error, "interrupted")
    except BaseException as error:
        # Prefect ends a flow by a signal; whether someone asked for it, its API knows.
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        run.end("Cancelled" if _asked_to_cancel(run) else "Crashed", error, reason)
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
