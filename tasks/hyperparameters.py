"""What the command reads at HYPERPARAMETERS_PATH."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks import volumes
from tasks.run import Run


def of_run(run: Run, tokens_path: Path | str | None) -> dict[str, Any]:
    """The parameters as this run's command sees them.

    For a command of ours: the checked settings under their canonical names. For a user's own:
    the parameters as they are. Both with /Volumes mapped where it is not mounted, and with
    output_dir as the run's own model folder, so that a run never overwrites another.
    """
    settings = run.workload.settings
    given = settings.model_dump(exclude_none=True) if settings else run.workload.parameters
    found = {**volumes.mapped(given), "output_dir": str(run.dir.model)}
    return {**found, "tokens_path": str(tokens_path)} if tokens_path else found
