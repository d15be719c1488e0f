"""What the workspace is like, and how the stand-in behaves: plain fields that a test sets."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class State:
    """The workspace: who asks, what exists, what is allowed. Change it at any time."""

    user: str = "ann@example.com"
    account_id: str | None = "0a0a0a0a-0000-4000-8000-000000000000"
    """As the workspace's address tells it; None where it does not."""
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    """Scope to key to value."""
    secrets_readable: bool = False
    """Whether get-secret answers: the documentation refuses it outside a notebook."""
    unreadable_scopes: set[str] = field(default_factory=set)
    catalogs: set[str] = field(default_factory=lambda: {"main", "system"})
    schemas: set[str] = field(default_factory=lambda: {"main.default"})
    volumes: set[str] = field(default_factory=set)
    """Full names, `catalog.schema.volume`; `DatabricksServer.add_volume` makes the folder too."""
    grants: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Full name to principal to privileges, as granted there (not inherited)."""
    denied: set[tuple[str, str]] = field(default_factory=set)
    """(privilege, full name) that the user lacks; everything else is allowed."""
    policies: set[str] = field(default_factory=set)
    """Known budget policies; empty knows them all."""
    policy_names: dict[str, str] = field(default_factory=dict)
    """Name to id, as the account lists them."""


@dataclass
class Rules:
    """Limits and delays; the defaults are the documented limits, and no delay."""

    procs_per_node: int | None = 1
    """LOCAL_WORLD_SIZE of a node instead of its accelerators; None keeps the asked number."""
    start_s: float = 0.0
    """PENDING before a task runs, when its plan names nothing else."""
    grace_s: float = 10.0
    """Between SIGTERM and SIGKILL of a node that is ended from outside."""
    terminating_s: float = 0.0
    """How long TERMINATING lasts, at least."""
    failed_as: str = "INTERNAL_ERROR"
    """How a command's non-zero exit shows: so it was seen, though Jobs documents FAILED."""
    visible_after_s: float = 0.0
    """How long runs/get and runs/list do not know a run that was submitted."""
    listing_lag_s: float = 0.0
    """How long a new file is missing from listings of its folder."""
    ready_after_s: float = 0.2
    """A model version stays PENDING_REGISTRATION this long after it was finalized."""
    registration_fails: bool = False
    """Whether the next versions end as FAILED_REGISTRATION instead."""
    max_put_bytes: int = 5 << 30
    min_part_bytes: int = 5 << 20
    signed_url_s: float = 3600.0
    page_size: int = 1000
    """Entries of a folder on one page, at most."""
    models_through_files: bool = True
    """Whether MLflow is told to upload model versions through the Files API."""
    multipart: bool = True
    """Whether uploads in parts are offered."""
    live_logs: bool = True
    """Whether the live log endpoint answers; False is FEATURE_DISABLED."""
    artifact_logs: bool = True
    """Whether an attempt's logs become artifacts of its MLflow run."""
    node_environment: dict[str, str] = field(default_factory=dict)
    """More variables for every node's command."""


@dataclass
class Plan:
    """What happens to every attempt of one submitted run. Without any field it simply runs.

    Times are seconds. The run waits `queue_s` as QUEUED, then `capacity_s` as the platform does for
    GPUs (the run RUNNING, its task PENDING), then `start_s` as PENDING. `waiting_as` replaces the
    word of all of these in both forms of the state. `nodes_run` False: no command is started.
    `after_s`: the command is ended so long after its start; `after_line`: once a node has printed a
    line with this text; `abruptly`: without SIGTERM. `ending` replaces how the attempt ends:
    SUCCESS, FAILED, TIMEDOUT, CANCELED, INTERNAL_ERROR, SKIPPED or another result state; `code` and
    `message` go with it. `parent` gives the run another ending than its task.
    """

    queue_s: float = 0.0
    capacity_s: float = 0.0
    start_s: float | None = None
    waiting_as: str | None = None
    nodes_run: bool = True
    after_s: float | None = None
    after_line: str | None = None
    abruptly: bool = False
    ending: str | None = None
    parent: str | None = None
    code: str | None = None
    message: str | None = None
