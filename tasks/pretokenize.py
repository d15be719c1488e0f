"""pretokenize: rows → sealed tokens on the volume, before any GPU is asked for."""

from __future__ import annotations

from typing import Any

import yaml
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks import hyperparameters, ui
from tasks.nouns import Secrets, Tokens
from tasks.policy import told
from tasks.program import run_program
from tasks.run import Run
from tasks.targets import is_platform
from tunewright.contract.progress import percent_of
from tunewright.contract.rundir import read_json, write_json, write_text


@task(persist_result=False, cache_policy=NO_CACHE)
@told
def pretokenize(run: Run, secrets: Secrets) -> Tokens:
    """Turn the workload's rows into sealed tokens, or find them sealed already."""
    if not wanted(run):
        return Tokens(None, {}, "the command is the user's own and reads its data itself")
    facts = _tokenize(run, secrets)
    if changed := _changed(run, facts):
        run.begin_anew(changed)
    write_json(run.dir.tokens, facts)
    run.data = facts
    return Tokens(facts["path"], facts)


def wanted(run: Run) -> bool:
    """tokens: on, off, or auto, which means for a command of ours."""
    tokens = run.options.tokens
    return tokens == "on" or (tokens == "auto" and run.workload.recipe is not None)


def _tokenize(run: Run, secrets: Secrets) -> dict[str, Any]:
    settings = hyperparameters.of_run(run, tokens_path=None)
    write_text(run.dir.hyperparameters, yaml.safe_dump(settings, sort_keys=False))
    if is_platform(run.options.target):
        run.target.bring_inputs(run.workload, ui.say)
    tokens = run.dir.root.parent / "tokens"
    page = run.dir.audit
    page.unlink(missing_ok=True)
    args = ["--settings", str(run.dir.hyperparameters), "--tokens-root", str(tokens)]
    args += ["--page", str(page)]
    bar = ui.ProgressBar("data-progress", "Rows that are tokenized")

    def heard(line: str) -> None:
        percent = percent_of(line)
        ui.say(line) if percent is None else bar.at(percent)

    try:
        facts = run_program(run, "pretokenize", args, secrets.values, heard)
        bar.end()
        return facts
    finally:
        # Also when the audit stops the run: then it matters most.
        if page.is_file():
            ui.show(page.read_text(encoding="utf-8"), "data-audit", "What the data is like")


def _changed(run: Run, facts: dict[str, Any]) -> str | None:
    before = read_json(run.dir.tokens)
    if before is None or before["fingerprint"] == facts["fingerprint"]:
        return None
    return (
        f"the data of {run.name} has changed since it began "
        f"({before['fingerprint'][:12]} → {facts['fingerprint'][:12]}, {facts['cache']})"
    )
