"""One job on the platform from its submission to its end: polled, shown, timed out, cancelled.

What was seen of it (when it began to run, why it was cancelled, its MLflow run) is written down
once, for whoever follows it after us.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tasks.targets.databricks.api import Denied, Missing, Refused, Workspace
from tasks.targets.databricks.logs import Logs
from tasks.targets.databricks.states import State, parent_of, state_of
from tasks.targets.databricks.tracking import PlatformRun, platform_run
from tasks.targets.guardian import undisturbed
from tasks.targets.job import leave_open
from tunewright.contract.failures import TunewrightError
from tunewright.contract.rundir import RunDir, read_json, write_json

GET = "/api/2.2/jobs/runs/get"
CANCEL = "/api/2.2/jobs/runs/cancel"
POLL_S = (2.0, 10.0)
"""Seconds between two looks: more often after a change, then ever more rarely. A hundred runs that
began together ask less than 100 times in any second, which is what the platform takes."""
_PATIENCE_S = 10.0
_SLICE_S = 0.2
_SAY_AGAIN_S = 60.0
_CANCEL_AGAIN_S = 30.0
_MARGIN_S = 30.0
"""How much later than the platform's our deadline is, so that its own word comes first."""
_INTERRUPTED_S = 60.0
"""How long an interrupted flow waits for its job to end."""
_UNKNOWN_S = 300.0
"""How long the platform may say that it does not know a job that it gave us."""
_PARENT_S = 60.0
"""How long a task may lag behind the run around it that has ended."""


class Watch:
    """One attempt's job, followed until it is over."""

    def __init__(
        self,
        workspace: Workspace,
        run: RunDir,
        attempt: int,
        job_run: int,
        *,
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
        deadline_s: float | None = None,
        margin_s: float = _MARGIN_S,
        tracked: Callable[[PlatformRun], None] = lambda found: None,
    ) -> None:
        """`tracked` is called once the attempt's MLflow run on the platform is known."""
        self._workspace, self._run, self._attempt, self.job_run = workspace, run, attempt, job_run
        self._say, self._cancelled, self._tracked = say, cancelled, tracked
        self._deadline_s = deadline_s + margin_s if deadline_s else None
        self._running_since: float | None = self._known("running").get("since")
        self.reason: str | None = None
        self.state = State("UNKNOWN")
        self.platform: PlatformRun | None = None
        self.url: str | None = None
        self._shown: tuple[str, str] | None = None
        self._said = self._cancel_sent = float("-inf")
        self._pause = POLL_S[0]
        self._parent_ended: float | None = None
        self._unknown_since: float | None = None
        if before := self._known("cancel").get("reason"):
            # Someone ended it before us: what matters now is that it is over.
            self.reason = "interrupted" if before == "cancel" else before

    def to_the_end(self, logs: Logs) -> State:
        """Follow the job until it has ended; left by an exception, it is cancelled first.

        Raises Missing when the platform does not know it any more, and Denied when for long we
        may not ask for it: then it goes on.
        """
        try:
            while not self._step(logs):
                self._rest()
        except (Missing, Denied):
            raise
        except BaseException as error:
            leave_open(error)
            with undisturbed():
                self._interrupt(error)
            raise
        return self.state

    def _step(self, logs: Logs) -> bool:
        """One look; whether it was the last."""
        self._look()
        self._find_platform_run()
        logs.look(self.platform, ended=self.state.ended)
        if self.state.ended:
            return True
        if reason := self._reason_to_cancel():
            self.cancel(reason)
        return False

    def _look(self) -> None:
        try:
            query = {"run_id": self.job_run}
            run = self._workspace.get(GET, query, patience_s=_PATIENCE_S)
            self._unknown_since = None
        except Refused as error:
            # A new job may not show yet; one that is gone for good does not come back.
            self._unknown_since = self._unknown_since or time.monotonic()
            if time.monotonic() < self._unknown_since + _UNKNOWN_S:
                self._tell_again(f"cannot ask for the job now: {error}")
                return
            if isinstance(error, Denied):
                # Another attempt beside a job that goes on would write into its folders.
                raise Denied(
                    f"job {self.job_run} cannot be followed: {error}; start this run again when "
                    "you may, and it is found"
                ) from None
            raise Missing(f"job {self.job_run} is gone: {error}") from None
        except TunewrightError as error:
            # The job goes on without us; only its end matters, and that can be asked later.
            self._tell_again(f"cannot ask for the job now: {error}")
            return
        self.url = run.get("run_page_url") or self.url
        self.state = self._settled(state_of(run), parent_of(run))
        self._show()
        if self.state.running and self._running_since is None:
            # The platform's own start of a task comes before the wait for capacity.
            self._running_since = time.time()
            self._remember("running", {"since": self._running_since})

    def _settled(self, task: State, parent: State) -> State:
        """The task's state; the run's when that has long ended and the task says nothing."""
        if not parent.ended or task.ended:
            self._parent_ended = None
            return task
        self._parent_ended = self._parent_ended or time.monotonic()
        return parent if time.monotonic() > self._parent_ended + _PARENT_S else task

    def _show(self) -> None:
        """Say a change at once, and a wait again every minute."""
        seen = (self.state.word, self.state.message)
        if seen != self._shown:
            self._shown, self._pause = seen, POLL_S[0]
            self._tell(self._words())
        elif not self.state.running and not self.state.ended:
            self._tell_again(self._words())

    def _words(self) -> str:
        state = self.state
        detail = f": {state.message}" if state.message else ""
        if state.ended or state.running:
            return f"job {self.job_run} is {state.result or state.word}{detail}"
        return f"waiting for job {self.job_run} ({state.word}{detail})"

    def _tell(self, text: str) -> None:
        self._said = time.monotonic()
        self._say(text)

    def _tell_again(self, text: str) -> None:
        if time.monotonic() > self._said + _SAY_AGAIN_S:
            self._tell(text)

    def _find_platform_run(self) -> None:
        """The attempt's MLflow run: told once, and written down for whoever links it."""
        if self.platform is not None or self.state.task_run_id is None:
            return
        with suppress(TunewrightError):
            self.platform = platform_run(self._workspace, self.state.task_run_id)
        if self.platform is not None:
            found = self.platform
            facts = {"experiment_id": found.experiment_id, "run_id": found.run_id, "url": found.url}
            self._remember("mlflow", facts)
            self._tell(f"MLflow on the platform: {found.url}")
            self._tracked(found)

    def _reason_to_cancel(self) -> str | None:
        if self._cancelled():
            return "cancel"
        limit, since = self._deadline_s, self._running_since
        if limit is not None and since is not None and time.time() > since + limit:
            return self.reason or "timeout"
        return self.reason

    def cancel(self, reason: str) -> None:
        """Ask the platform to end the job, again until it has; the first reason stays."""
        if time.monotonic() < self._cancel_sent + _CANCEL_AGAIN_S:
            return
        self._cancel_sent, self._pause = time.monotonic(), POLL_S[0]
        if self.reason is None:
            self.reason = reason
            self._tell(f"cancelling job {self.job_run} ({reason})")
        self._remember("cancel", {"reason": self.reason})
        try:
            self._workspace.post(CANCEL, {"run_id": self.job_run}, patience_s=_PATIENCE_S)
        except TunewrightError as error:
            # A job that has ended meanwhile may not be cancelled; the next look tells.
            self._tell_again(f"the job could not be cancelled: {error}")

    def _interrupt(self, error: BaseException) -> None:
        """Cancel and wait a while; a job that has not ended by then is left for the next start."""
        limit = time.monotonic() + _INTERRUPTED_S
        self.cancel("interrupted")
        with suppress(TunewrightError):
            while not self.state.ended and time.monotonic() < limit:
                time.sleep(POLL_S[0])
                self._look()
        # One that ended well before it could be cancelled is for the next start to collect.
        is_over = self.state.ended and not self.state.well
        leave_open(error, not is_over)

    def _rest(self) -> None:
        """Until the next look, or a request to cancel."""
        # Runs that began together must not ask together.
        end = time.monotonic() + self._pause * random.uniform(0.7, 1.3)
        self._pause = min(1.4 * self._pause, POLL_S[1])
        while time.monotonic() < end:
            time.sleep(_SLICE_S)
            if self.reason is None and self._cancelled():
                return

    def _known(self, fact: str) -> dict[str, Any]:
        return read_json(self._run.platform(self._attempt, fact)) or {}

    def _remember(self, fact: str, facts: Mapping[str, Any]) -> None:
        place = self._run.platform(self._attempt, fact)
        if not place.exists():
            write_json(place, {**facts, "at": time.time()})
