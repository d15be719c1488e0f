"""consolidate and register as one job on a platform: where the volume is, and the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks import attempts, ui
from tasks.program import ProgramFailed
from tasks.run import Cancelled, Run
from tasks.targets import is_platform
from tasks.targets.databricks import finish
from tasks.targets.job import Ending, is_left_open
from tunewright.contract.failures import DataError, TunewrightError, UserError
from tunewright.contract.rundir import read_json

_CLASSES = {"user": UserError, "data": DataError}


def is_elsewhere(run: Run) -> bool:
    return is_platform(run.options.target)


def finished(run: Run) -> dict[str, Any] | None:
    """{"consolidate", "register"} of this run's job, made now or before.

    None when the command left nothing. Raises UserError, DataError or ProgramFailed with the job's
    own sentence.
    """
    known = read_json(finish.result_of(run.dir))
    if known is not None and _is_asked_for(run, known):
        return known
    if not finish.left_something(run.dir):
        return None
    # The first may be a job that an earlier start began, to register under another name.
    for _ in range(2):
        result = _by_a_job(run)
        if _is_asked_for(run, result):
            return result
        ui.say(f"that job registered as {_name_in(result)}, not as {run.options.register_as}")
    raise ProgramFailed("the job that consolidates does not register under the name it was given")


def _by_a_job(run: Run) -> dict[str, Any]:
    """What a job leaves that is run to its end: one that is still open, or a new one."""
    folder = finish.folder_of(run.dir)
    number = attempts.open_number(folder) or attempts.next_number(folder)
    attempts.begin(folder, number)
    ui.say("consolidating and registering on the platform, by a job of its own")
    try:
        ending, result = finish.finish(
            run.dir,
            number,
            run.workload,
            name=run.options.register_as,
            tags=run.tags(),
            say=lambda node, line: ui.say(line),
            cancelled=run.is_cancelled,
        )
    except BaseException as error:
        if not is_left_open(error):
            attempts.conclude_interrupted(folder, number)
        raise
    attempts.conclude(folder, number, ending)
    if result is None:
        run.raise_if_cancelled()
        raise _error_of(ending)
    return dict(result)


def _is_asked_for(run: Run, result: Mapping[str, Any]) -> bool:
    """Whether the model is registered as it should be, if there is one and it should."""
    has_model = result["consolidate"]["model"] is not None
    return not has_model or run.options.register_as in (None, _name_in(result))


def _name_in(result: Mapping[str, Any]) -> str | None:
    """The name that a job has registered the model under."""
    return (result["register"] or {}).get("name")


def _error_of(ending: Ending) -> TunewrightError:
    if ending.stopped_by == "cancel":
        return Cancelled("the job that consolidates was cancelled on the platform")
    unknown = {"class": "unknown", "message": "it left no result"}
    failure: Mapping[str, Any] = ending.failure or unknown
    kind = _CLASSES.get(failure["class"])
    if kind is not None:
        return kind(str(failure["message"]))
    error = ProgramFailed(f"the job that consolidates: {failure['message']}\n{ending.tail}")
    error.failure_class = failure["class"]
    return error
