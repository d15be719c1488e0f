"""torchrun's launcher API as a program: one agent, a process per rank, no restarts.

    started with the folder of a call and the number of its ranks, below `tunewright.node`

It is a process of its own since the agent handles signals in its main thread and blocks until the
ranks have ended: in a notebook both belong to the user. Below a guardian it ends with all its
ranks in every ending, also when the notebook is killed.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tunewright.contract.processes import GRACE_S
from tunewright.contract.rundir import write_json
from tunewright.notebook.folder import CallFolder
from tunewright.notebook.program import code_of


def main() -> int:
    """Run the ranks to their end; exit code 1 when one of them failed, told in a file."""
    folder = CallFolder(Path(sys.argv[1]))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(sys.argv[2]),
        run_id=uuid.uuid4().hex,
        # The agent's own store on a port that the system chooses: nobody else can take it first.
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.root / "elastic")),
        **_grace(),
    )
    rank = ("-c", code_of("tunewright.notebook.rank"), str(folder.root))
    try:
        elastic_launch(config, sys.executable)(*rank)
    except ChildFailedError as error:
        # In torchrun's own words, which the guardian reads for the cause.
        print(error)
        deaths = {
            str(rank): {"exit_code": failure.exitcode, "at": failure.timestamp}
            for rank, failure in error.failures.items()
        }
        write_json(folder.deaths, deaths)
        return 1
    return 0


def _grace() -> dict[str, Any]:
    """How long ranks may take to end; torch before 2.13 has no such setting, and waits 30 s."""
    known = LaunchConfig.__dataclass_fields__
    return {"shutdown_timeout": int(GRACE_S)} if "shutdown_timeout" in known else {}
