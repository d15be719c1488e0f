"""The folder of a run: every file name in it, and what it means for a folder to be finished.

    <output_dir>/tokens/<fingerprint>/            sealed tokens, shared by runs with the same data
    <output_dir>/<run>/workload.yaml              the effective workload, secret names only
                       hyperparameters.yaml       what the command reads
                       data-audit.md              what the data is like
                       code/<hash>/<folder>/      the unpacked snapshot, when there is one
                       state/                     small files, each written once (the lock apart)
                       logs/attempt-1/node-0.log  one log per node, secrets scrubbed
                       logs/attempt-1/events.jsonl  what the recipe did, step by step
                       logs/attempt-1/trace-steps-10-12.json.gz  what rank 0 traced, on request
                       checkpoints/step-00000200/ sharded, sealed
                       base/                      random frozen weights below adapters, sealed
                       model/                     Hugging Face folder, sealed
                       receipt.json               the facts of the run

A folder is finished when it is sealed: `manifest.json`, written last, lists every file with its
size and xxh3-128 hash. Readers trust only sealed folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RECEIPT = "receipt.json"
WORKLOAD = "workload.yaml"
HYPERPARAMETERS = "hyperparameters.yaml"
EVENTS = "events.jsonl"
WHOLE_FILES_VARIABLE = "TUNEWRIGHT_WHOLE_FILES"
_STEP = re.compile(r"step-(\d{8})")


def home() -> Path:
    """The folder of all local state: TUNEWRIGHT_HOME, by default ~/.tunewright."""
    given = os.environ.get("TUNEWRIGHT_HOME") or "~/.tunewright"
    return Path(given).expanduser().absolute()


def needs_staging(path: Path) -> bool:
    """Whether a path is on a mount that takes whole files only, written once from start to end.

    Such a place knows no append, no writing in the middle and no cheap rename: a folder is made on
    the local disk and copied there, its marker last. It is a mounted Databricks volume,
    /Volumes/<catalog>/<schema>/<volume>, or below a folder that TUNEWRIGHT_WHOLE_FILES names
    (several: separated like PATH).
    """
    place = path.absolute()
    if place.is_relative_to("/Volumes") and Path(*place.parts[:5]).is_dir():
        return any(Path(*place.parts[:n]).is_mount() for n in range(2, 6))
    named = os.environ.get(WHOLE_FILES_VARIABLE, "").split(os.pathsep)
    return any(place.is_relative_to(Path(folder).absolute()) for folder in named if folder)


@dataclass(frozen=True)
class RunDir:
    """The folder of one run, `<output_dir>/<run>`."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def workload(self) -> Path:
        return self.root / WORKLOAD

    @property
    def hyperparameters(self) -> Path:
        return self.root / HYPERPARAMETERS

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def identity(self) -> Path:
        return self.state / "run.json"

    @property
    def lock(self) -> Path:
        return self.state / "lock.json"

    @property
    def cancel_request(self) -> Path:
        return self.state / "cancel.json"

    @property
    def mlflow(self) -> Path:
        return self.state / "mlflow.json"

    @property
    def memory(self) -> Path:
        """What a GPU of this run takes at once, found by the first attempt."""
        return self.state / "memory.json"

    @property
    def tokens(self) -> Path:
        return self.state / "tokens.json"

    @property
    def audit(self) -> Path:
        """The audit of the data as Markdown, also of data that stopped the run."""
        return self.root / "data-audit.md"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def base(self) -> Path:
        """The frozen model below adapters, where its weights are random and so nowhere else."""
        return self.root / "base"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def receipt(self) -> Path:
        return self.root / RECEIPT

    def attempt_state(self, attempt: int) -> Path:
        return self.state / f"attempt-{attempt}"

    def attempt_logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt-{attempt}"

    def node_log(self, attempt: int, node: int) -> Path:
        return self.attempt_logs(attempt) / f"node-{node}.log"

    def node_exit(self, attempt: int, node: int) -> Path:
        return self.attempt_state(attempt) / f"node-{node}.json"

    def platform(self, attempt: int, fact: str) -> Path:
        """A fact about an attempt's job on a platform, in a file of its own, written once.

        Facts are submitting, job, running, cancel, mlflow and metrics.
        """
        return self.attempt_state(attempt) / f"platform-{fact}.json"

    def events(self, attempt: int) -> Path:
        return self.attempt_logs(attempt) / EVENTS

    def step_log(self, step: str) -> Path:
        """The log of a step that runs as one program: pretokenize, consolidate or register."""
        return self.root / "logs" / f"{step}.log"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def attempts(self) -> list[int]:
        """Numbers of the attempts that were started, in order."""
        found = self.state.glob("attempt-*") if self.state.is_dir() else ()
        numbers = (p.name.removeprefix("attempt-") for p in found)
        return sorted(int(number) for number in numbers if number.isdecimal())


def trace_name(steps: range) -> str:
    """The name of a profiler's trace, beside the events of its attempt."""
    return f"trace-steps-{steps[0]}-{steps[-1]}.json.gz"


def sealed_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """The sealed checkpoints below a folder as (step, folder), oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [(int(m[1]), p) for p in checkpoints.iterdir() if (m := _STEP.fullmatch(p.name))]
    return sorted((step, path) for step, path in found if is_sealed(path))


def next_start(checkpoints: Path) -> str:
    """Where a training that ends now goes on when it is started again, in words."""
    sealed = sealed_checkpoints(checkpoints)
    if not sealed:
        return "no checkpoint is sealed, starting again begins at step 0"
    step, path = sealed[-1]
    return f"starting again goes on from step {step} ({path})"


def seal(
    folder: Path,
    facts: Mapping[str, Any] | None = None,
    hashes: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Mark a folder as finished and return its manifest.

    `facts` stand beside "files" in the manifest. `hashes` ({relative path: {"size", "xxh3_128"}})
    are entries that their writers computed already, so that no byte is read twice.
    """
    known = dict(hashes or {})
    missing = [p for p in _files(folder) if p not in known]
    known.update(hash_files(folder, missing))
    manifest = {**(facts or {}), "files": {name: dict(known[name]) for name in sorted(known)}}
    write_json(folder / MANIFEST, manifest)
    return manifest


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size in bytes and xxh3-128 of the named files: {name: {"size", "xxh3_128"}}."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: hash_file(folder / name), names)
        return {
            n: {"size": (folder / n).stat().st_size, "xxh3_128": d}
            for n, d in zip(names, digests, strict=True)
        }


def hash_file(path: Path) -> str:
    """The xxh3-128 of a file's bytes, in hex; reads 4 MiB at a time."""
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(4 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a sealed folder; None when it is not sealed by us."""
    facts = read_json(folder / MANIFEST)
    return facts if facts is not None and _lists_files(facts.get("files")) else None


def _lists_files(files: Any) -> bool:
    """Whether this is a seal's list of files: another tool's manifest.json is none."""
    return isinstance(files, dict) and all(
        isinstance(entry, dict) and {"size", "xxh3_128"} <= set(entry) for entry in files.values()
    )


def is_sealed(folder: Path) -> bool:
    """Whether the folder has a manifest and every file in it is there with its size."""
    facts = manifest(folder)
    return facts is not None and not damage(folder, facts, sizes_only=True)


def damage(folder: Path, facts: Mapping[str, Any], *, sizes_only: bool = False) -> list[str]:
    """What is wrong with a sealed folder, one sentence each; an empty list when it is whole."""
    found = []
    for name, entry in facts.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size != entry["size"]:
            found.append(f"{path} has {path.stat().st_size} bytes, the seal says {entry['size']}")
        elif not sizes_only and hash_file(path) != entry["xxh3_128"]:
            found.append(f"{path} does not have the sealed hash")
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a small file; None when it is missing or torn."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a small file so that a reader sees the old one, the new one, or none: never half."""
    write_text(path, json.dumps(facts, indent=2, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text beside its place, then move it there, with the bytes on disk first.

    Where files cannot be moved it is written in its place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if needs_staging(path):
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _files(folder: Path) -> list[str]:
    found = (p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    return sorted(str(p.relative_to(folder)) for p in found)
