"""resolve_secret: names → values, so that a missing one fails before anything starts."""

from __future__ import annotations

import os
import re

import httpx
from prefect import task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE

from tasks import ui
from tasks.nouns import Secrets
from tasks.policy import told
from tasks.run import Run
from tasks.targets import is_platform
from tasks.targets.databricks import secret_values
from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.scrub import SHORTEST, Scrubber


@task(persist_result=False, cache_policy=NO_CACHE)
@told
def resolve_secret(run: Run) -> Secrets:
    """Look up every secret that the workload names; values stay in memory."""
    known = is_platform(run.options.target)
    secrets = known_here(run) if known else look_up(run.workload.secrets)
    run.scrubber = Scrubber(secrets.values)
    for name in sorted(secrets.values):
        short = len(secrets.values[name]) < SHORTEST
        hint = ", too short to be masked in output" if short else ""
        ui.say(f"secret {name} from {run.workload.secrets[name]}: found{hint}")
    return secrets


def known_here(run: Run) -> Secrets:
    """The values that this machine knows, for pre-tokenizing and for masking: maybe none.

    The platform gives the command its secrets; here is only checked that they exist there.
    """
    run.target.require(run.workload)
    found = {}
    for name, reference in run.workload.secrets.items():
        ui.say(f"secret {name} from {reference}: the platform has it")
        if value := os.environ.get(name) or _from_block(block_name(reference)):
            found[name] = value
    return Secrets(found)


def look_up(references: dict[str, str]) -> Secrets:
    """Values of {NAME: scope/key}: environment, then a Prefect Secret block, then Databricks.

    Raises UserError that names, for every missing one, each place that was searched.
    """
    found, missing = {}, []
    for name, reference in references.items():
        value = os.environ.get(name) or _from_block(block_name(reference))
        try:
            found[name] = value or secret_values.value_of(reference)
        except UserError as error:
            missing.append(
                f"{name} ({reference}): not in the environment variable {name}, "
                f"no Prefect Secret block {block_name(reference)!r}, and {error}"
            )
    if missing:
        raise UserError("secrets are missing:\n  " + "\n  ".join(missing))
    return Secrets(found)


def block_name(reference: str) -> str:
    """my_scope/hf_token as the name of a Prefect block: my-scope-hf-token."""
    return re.sub(r"[^a-z0-9]+", "-", reference.lower()).strip("-")


def _from_block(name: str) -> str | None:
    try:
        block = Secret.load(name)
    except ValueError:
        return None
    except httpx.HTTPError as error:
        away = TunewrightError(f"the Prefect API cannot be asked for the block {name!r}: {error}")
        away.failure_class = "infrastructure"
        raise away from None
    value = block.get() if isinstance(block, Secret) else None
    return value if isinstance(value, str) else None
