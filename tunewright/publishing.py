"""Where a model folder is made, and how it comes to its place without being half there."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from tunewright.contract import rundir
from tunewright.contract.failures import TunewrightError
from tunewright.contract.rundir import RunDir

_HALF_COPIED = ".half-copied"
_COPIES_AT_ONCE = 4


def publish(run: RunDir, draft: Path) -> None:
    """Move the sealed draft into place. What was there is deleted if it was ours, else kept."""
    if _holds_files(run.model):
        if _is_ours(run.model):
            os.replace(run.model, replaced(run))
        else:
            os.replace(run.model, _kept_aside(run))
    os.replace(draft, run.model)
    shutil.rmtree(replaced(run), ignore_errors=True)


def publish_copy(run: RunDir, draft: Path) -> None:
    """Copy the sealed draft into place, whole files, its seal last; the rest is as for a move."""
    if _holds_files(run.model):
        if not _is_ours(run.model):
            shutil.copytree(run.model, _kept_aside(run), copy_function=_copy_file)
        (run.model / rundir.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(run.model)
    say(f"copying the model folder from {draft} to {run.model}")
    try:
        _copy_folder(draft, run.model)
    except BaseException:
        shutil.rmtree(run.model, ignore_errors=True)
        raise


def _copy_folder(draft: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _HALF_COPIED).touch()
    seal = Path(rundir.MANIFEST)
    found = [path.relative_to(draft) for path in draft.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(max_workers=_COPIES_AT_ONCE) as pool:
        files = sorted(name for name in found if name != seal)
        list(pool.map(lambda name: _copy_file(draft / name, folder / name), files))
    _copy_file(draft / seal, folder / seal)
    (folder / _HALF_COPIED).unlink()


def _copy_file(source: str | Path, target: str | Path) -> None:
    """Write a copy from start to end, see it to the disk, and look whether all of it is there."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as read, open(target, "wb") as write:
        shutil.copyfileobj(read, write, 4 << 20)
        write.flush()
        os.fsync(write.fileno())
    sizes = [Path(path).stat().st_size for path in (source, target)]
    if sizes[0] != sizes[1]:
        raise TunewrightError(f"{target} has {sizes[1]} bytes after copying, {sizes[0]} were read")


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _is_ours(folder: Path) -> bool:
    """Whether a model folder was made here from a checkpoint, if only in part."""
    source = str((rundir.manifest(folder) or {}).get("source", ""))
    return source.startswith("checkpoint") or (folder / _HALF_COPIED).exists()


def _kept_aside(run: RunDir) -> Path:
    """A free name for files in the model folder that are not from a checkpoint."""
    taken = 1
    found = wanted = run.root / "model-of-the-command"
    while found.exists():
        taken += 1
        found = wanted.with_name(f"{wanted.name}-{taken}")
    say(f"{run.model} holds files that are not from the checkpoint; they go to {found}")
    return found


def draft_of(run: RunDir) -> Path:
    """Where the folder is made: beside its place, or on the local disk when that is no place to
    write files in parts. The same at each start, so that what a killed one left is found."""
    if rundir.needs_staging(run.root):
        place = xxh3_64_hexdigest(os.fsencode(run.root.absolute()))
        name = f"tunewright-{os.getuid()}-{run.name}-{place}.model.draft"
        return Path(tempfile.gettempdir(), name)
    return run.root / ".model.draft"


def replaced(run: RunDir) -> Path:
    return run.root / ".model.replaced"


def say(text: str) -> None:
    """A line for the log of the step."""
    print(f"consolidate: {text}", file=sys.stderr, flush=True)
