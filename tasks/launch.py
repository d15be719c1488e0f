"""launch: the workload's command on its nodes, one attempt a call; Prefect counts the calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import yaml
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks import attempts, hyperparameters, ui
from tasks.nouns import Secrets, Shards, Tokens
from tasks.policy import told
from tasks.run import Cancelled, Run, TimedOut
from tasks.targets import is_platform
from tasks.targets.job import Ending, Job, is_left_open
from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.progress import trained_percent
from tunewright.contract.rundir import write_text

_REDRAWN_S = 1.0


class LaunchFailed(TunewrightError):
    """The command ended badly. Its class says whether another attempt may help."""

    retryable = True
    stopped_by: str | None = None


UNTOLD: dict[str, Any] = {"class": "unknown", "node": 0, "rank": None, "message": "it failed"}
"""The failure of an attempt of which no node said anything."""


@task(persist_result=False, cache_policy=NO_CACHE)
@told
def launch(run: Run, tokens: Tokens, secrets: Secrets) -> Shards:
    """Run the command on every node to its end; nothing of it is left afterwards."""
    if attempts.ended_well(run.dir):
        ui.say("the command has already ended well in this run; not launching it again")
        return Shards(run.dir)
    parameters = hyperparameters.of_run(run, tokens.path)
    if is_platform(run.options.target):
        parameters = run.target.parameters_of(run.workload, parameters)
    write_text(run.dir.hyperparameters, yaml.safe_dump(parameters, sort_keys=False))
    job = job_of(run, _number(run))
    attempts.begin(run.dir, job.attempt)
    ui.say(f"attempt {job.attempt}: {job.nodes} nodes x {job.procs_per_node} processes")
    bar = ui.ProgressBar("training-progress", "Steps that are trained")
    try:
        ending = run.target.run(
            job,
            secrets.values,
            _narrator(job.nodes, bar.at),
            run.placement,
            cancelled=run.is_cancelled,
            started=run.lock.guarded_by,
        )
    except BaseException as error:
        # Of an attempt on a platform nobody may know how it is; then the next start looks.
        if not is_left_open(error):
            step = getattr(error, "checkpoint_step", None)
            attempts.conclude_interrupted(run.dir, job.attempt, step)
        raise
    attempts.conclude(run.dir, job.attempt, ending)
    run.link_platform(job.attempt)
    if not ending.well:
        raise failure_of(run, job.attempt, ending)
    bar.end()
    return Shards(run.dir)


def _number(run: Run) -> int:
    """The attempt to run: on a platform one that is still open, since its job may be going on."""
    going_on = attempts.open_number(run.dir) if is_platform(run.options.target) else None
    return going_on or attempts.next_number(run.dir)


def job_of(run: Run, attempt: int) -> Job:
    """The attempt as a value."""
    minutes = run.workload.timeout_minutes
    return Job(
        run=run.dir,
        attempt=attempt,
        command=run.workload.command,
        nodes=run.placement.nodes,
        procs_per_node=run.placement.procs_per_node,
        env_variables=run.workload.env_variables,
        code=run.code_folder(),
        has_parameters=bool(run.workload.parameters),
        mlflow=run.mlflow(),
        deadline_s=minutes * 60 if minutes else None,
    )


def failure_of(run: Run, attempt: int, ending: Ending) -> TunewrightError:
    """What an attempt's bad ending means: what failed, where, the end of that log, and the rest."""
    run.raise_if_cancelled()
    if ending.stopped_by == "cancel":
        return Cancelled(f"attempt {attempt} was cancelled on the platform")
    failure = ending.failure or UNTOLD
    stuck = attempts.without_progress(run.dir)
    if failure["class"] == "timeout":
        limit = f"timeout_minutes: {run.workload.timeout_minutes}"
        how = f"reached {limit}; its processes are ended"
        if ending.stopped_by is None:  # the command ended by itself, in time
            how = f"ended before {limit} was reached: {failure['message']}"
        return _marked(TimedOut(f"attempt {attempt} {how}"), stuck)
    log = run.dir.node_log(attempt, failure["node"])
    rank = f", rank {failure['rank']}" if failure["rank"] is not None else ""
    head = f"attempt {attempt} failed on node {failure['node']}{rank} ({failure['class']})"
    message = f"{head}: {failure['message']}\n"
    if failure["class"] == "user":
        return UserError(f"{message}the log is {log}")
    # What our own programs say is enough; otherwise the end of the log is the evidence.
    told = failure["class"] in ("data", "nonfinite")
    message += f"the log is {log}" if told else f"the end of {log}:\n{_indented(ending.tail)}"
    error = LaunchFailed(message)
    error.failure_class = failure["class"]
    return _marked(error, stuck)


def _marked(error: LaunchFailed | TimedOut, stuck: str | None) -> TunewrightError:
    """The error, final when the attempts make no progress."""
    if stuck:
        error.retryable = False
        error.stopped_by = "no-progress"
        error.args = (f"{error}\nno further attempt: {stuck}",)
    return error


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _narrator(nodes: int, trained: Callable[[float], None]) -> Callable[[int, str], None]:
    """Output lines into the run's log, by node where there are several.

    `trained` gets the percentage that the line of a step tells.
    A progress bar that redraws itself would flood the log: one line a second stands for it.
    """
    shown: dict[tuple[int, str], float] = {}

    def say(node: int, line: str) -> None:
        bar = _bar(line)
        if bar is not None:
            now = time.monotonic()
            if now - shown.get((node, bar), -_REDRAWN_S) < _REDRAWN_S:
                return
            shown[(node, bar)] = now
        ui.say(f"[node {node}] {line}" if nodes > 1 else line)
        percent = trained_percent(line)
        if percent is not None:
            trained(percent)

    return say


def _bar(line: str) -> str | None:
    """The name of the progress bar that a line belongs to; None for an ordinary line."""
    name, percent, _ = line.partition("%|")
    return name.rstrip("0123456789 ") if percent else None
