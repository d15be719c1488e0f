"""Fine-tune a model as its workload file says, and register the result.

resolve_secret → pretokenize → launch → consolidate → register
"""

# Prefect reads the types of the parameters at run time: no postponed annotations here.
from pathlib import Path
from typing import Any, Literal

from prefect import flow

from tasks.consolidate import consolidate
from tasks.ending import ending, for_the_reader
from tasks.launch import launch
from tasks.policy import policies
from tasks.pretokenize import pretokenize
from tasks.register import register
from tasks.resolve_secret import resolve_secret
from tasks.run import Options, opened
from tasks.ui import flow_run_name


@flow(name="sft", flow_run_name=flow_run_name, retries=0, persist_result=False)
@for_the_reader
def sft(
    workload: Path | dict[str, Any],
    set: dict[str, Any] = {},  # noqa: B006 - the contract's name and default
    target: Literal["local", "ray", "databricks"] = "local",
    register_as: str | None = None,
    simulate: bool = False,
    procs_per_node: int | None = None,
    tokens: Literal["auto", "on", "off"] = "auto",
    resume: str | None = None,
    fresh: bool = False,
) -> Any:
    """Fine-tune a model as its workload says.

    Args:
        workload: Path of the workload YAML, or the workload itself.
        set: Values that replace those of the workload, by dotted path.
        target: Where the command runs.
        register_as: Name of the registered model; unset: the experiment_name.
        simulate: Run on the processors that are here instead of the accelerators asked for.
        procs_per_node: Processes per simulated node.
        tokens: Whether to pre-tokenize; auto: for our recipes.
        resume: Name of the run to go on with.
        fresh: Start over instead of continuing an unfinished run.
    """
    options = Options(target, register_as, simulate, procs_per_node, tokens, resume, fresh)
    with opened(workload, set, options) as run:
        step = policies(run)
        secrets = step(resolve_secret)()
        rows = step(pretokenize)(secrets)
        shards = step(launch)(rows, secrets)
        model = step(consolidate)(shards)
        step(register)(model)
    return ending(run)
