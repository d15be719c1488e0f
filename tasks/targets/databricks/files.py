"""Folders of a volume through the Files API, for machines on which it is not mounted.

Several files at a time; a file that is there with its size is not sent again, a large one goes in
parts so that a cut costs a part, and a torn download goes on where it stopped. A folder's marker,
`manifest.json`, always comes last, so that half a folder is never taken for one: sizes are checked
on the way out, hashes on the way in.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tasks.targets.databricks.api import (
    Denied,
    Missing,
    NotOffered,
    Refused,
    Workspace,
    WorkspaceAway,
    opened,
    quoted,
)
from tunewright.contract.failures import TunewrightError
from tunewright.contract.rundir import MANIFEST, hash_file, manifest

FILES = "/api/2.0/fs/files"
FOLDERS = "/api/2.0/fs/directories"
AT_ONCE = 8
LARGE = 50 << 20
"""Bytes from which a file goes in parts; databricks-sdk draws the line there too."""
_PART = 5 << 20
_MOST_PARTS = 10_000
"""S3 takes so many, and none below 5 MiB but the last
(docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html).
"""
_LARGE_AT_ONCE = 4
PARTS_AT_ONCE = 8
"""Of all files together. The SDK keeps two parts for each on its way and one for each file in
memory: 100 MiB, and the allocator about half of that again.
"""
_CHUNK = 1 << 20
_TRIES = 5
_SAY_EVERY_S = 5.0

Say = Callable[[str], None]


class Transfer(TunewrightError):
    """Files did not arrive as they left; another attempt may help."""

    failure_class = "infrastructure"


class Facts(NamedTuple):
    """A file on a volume."""

    size: int
    """Bytes."""
    changed: int
    """When it was written last, in whole Unix seconds; 0 where that is not told."""


class Progress:
    """Bytes that went by, told every few seconds."""

    def __init__(self, verb: str, total: int, say: Say) -> None:
        self._verb, self._total, self._say = verb, total, say
        self._done, self._told = 0, time.monotonic()
        self._mutex = threading.Lock()

    def add(self, count: int) -> None:
        with self._mutex:
            self._done += count
            if time.monotonic() < self._told + _SAY_EVERY_S:
                return
            self._told = time.monotonic()
            share = self._done / max(1, self._total)
            line = (
                f"{self._verb} {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB ({share:.0%})"
            )
        self._say(line)


def upload(workspace: Workspace, folder: Path, target: str, say: Say = lambda line: None) -> None:
    """A sealed folder to a volume, its seal last; one that is sealed there the same is left alone.

    Raises Transfer when a file changed since it was sealed, or did not arrive whole.
    """
    facts = manifest(folder)
    if facts is None:
        raise Transfer(f"{folder} is not sealed; nothing of it is sent")
    seal = (folder / MANIFEST).read_bytes()
    if content(workspace, f"{target}/{MANIFEST}") == seal:
        return
    files: Mapping[str, Mapping[str, Any]] = facts["files"]
    there = sizes(workspace, target)
    missing = [name for name in files if there.get(name) != files[name]["size"]]
    make_folders(
        workspace, {str(PurePosixPath(target, name).parent) for name in [*files, MANIFEST]}
    )
    large = [name for name in missing if files[name]["size"] >= LARGE]
    parts_at_once = PARTS_AT_ONCE // min(max(1, len(large)), _LARGE_AT_ONCE)
    total = sum(files[name]["size"] for name in missing)
    say(f"sending {len(missing)} of {len(files)} files, {total / 1e6:,.1f} MB, to {target}")
    progress = Progress("sent", total, say)

    def send(name: str) -> None:
        entry, path = files[name], folder / name
        if hash_file(path) != entry["xxh3_128"]:
            raise Transfer(f"{path} changed after it was sealed; it is not sent")
        put(workspace, path, f"{target}/{name}", parts_at_once)
        arrived = size(workspace, f"{target}/{name}")
        if arrived != entry["size"]:
            raise Transfer(f"{target}/{name} has {arrived} bytes, sent were {entry['size']}")
        progress.add(entry["size"])

    _side_by_side(send, [name for name in missing if files[name]["size"] < LARGE])
    _side_by_side(send, large, _LARGE_AT_ONCE)
    put(workspace, seal, f"{target}/{MANIFEST}")


def download(workspace: Workspace, source: str, folder: Path, say: Say = lambda line: None) -> None:
    """A sealed folder from a volume, its seal last; raises Missing when it is not sealed there."""
    seal = content(workspace, f"{source}/{MANIFEST}")
    if seal is None:
        raise Missing(f"{source} is not sealed; there is nothing to fetch")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{MANIFEST}.part"
    draft.write_bytes(seal)
    facts = _facts(draft, source)
    files: Mapping[str, Mapping[str, Any]] = facts["files"]
    missing = [name for name, entry in files.items() if not _is_whole(folder / name, entry)]
    total = sum(files[name]["size"] for name in missing)
    say(f"fetching {len(missing)} of {len(files)} files, {total / 1e6:,.1f} MB, from {source}")
    progress = Progress("fetched", total, say)

    def get(name: str) -> None:
        fetch(workspace, f"{source}/{name}", folder / name, files[name], progress.add)

    _side_by_side(get, missing)
    os.replace(draft, folder / MANIFEST)


def fetch(
    workspace: Workspace,
    source: str,
    place: Path,
    expected: Mapping[str, Any] | None = None,
    count: Callable[[int], None] = lambda n: None,
) -> None:
    """One file; what came before a cut stays and is gone on with.

    `expected` is its entry in a manifest: {"size", "xxh3_128"}. Raises Missing, or Transfer when
    the file does not come whole, or is not the expected one.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(place)
    goal = expected["size"] if expected else size(workspace, source)
    for _ in range(_TRIES):
        _read_on(workspace, source, part, goal, count)
        if part.stat().st_size != goal:
            continue
        if expected is None or hash_file(part) == expected["xxh3_128"]:
            os.replace(part, place)
            return
        part.unlink()
    raise Transfer(f"{source} does not come whole, or has not the sealed hash, {_TRIES} times over")


def part_of(place: Path) -> Path:
    """Where a file lies while it is not here whole."""
    return place.with_name(f".{place.name}.part")


def put(
    workspace: Workspace, what: bytes | Path, target: str, parts_at_once: int = PARTS_AT_ONCE
) -> None:
    """Write one file of a volume, whole; its folder is there.

    Raises Transfer when a large file does not get there whole.
    """
    if isinstance(what, Path) and what.stat().st_size >= LARGE:
        _put_parts(workspace, what, target, parts_at_once)
        return
    workspace.send("PUT", FILES + quoted(target), opened(what), {"overwrite": "true"})


def _put_parts(workspace: Workspace, source: Path, target: str, parts_at_once: int) -> None:
    """A large file; nothing of it shows on the volume before all of it is there."""
    total, before = source.stat().st_size, _facts_if_there(workspace, target)

    def arrived() -> bool:
        """Whether the end was reached, whatever was answered: another file than before is there."""
        with suppress(TunewrightError):
            now = facts_of(workspace, target, patience_s=0)
            return now != before and now.size == total
        return False

    part_bytes = max(_PART, -(-total // _MOST_PARTS))
    try:
        workspace.send_parts(source, target, part_bytes, parts_at_once, arrived)
    except (Denied, NotOffered):
        raise
    except Refused as error:
        # The folder is there and the name is ours: what was refused is this upload, not its user.
        raise Transfer(f"{source} does not get to {target}: {error}") from None


def _facts_if_there(workspace: Workspace, path: str) -> Facts | None:
    with suppress(Missing):
        return facts_of(workspace, path)
    return None


def content(workspace: Workspace, path: str) -> bytes | None:
    """A small file's bytes; None when it is not there."""
    with suppress(Missing):
        for _ in range(_TRIES):
            with suppress(OSError), closing(workspace.read(FILES + quoted(path))) as stream:
                return stream.read()
        raise WorkspaceAway(f"{path} cannot be read whole")
    return None


def size(workspace: Workspace, path: str) -> int:
    """Bytes of a file on a volume; raises Missing."""
    return int(workspace.head(FILES + quoted(path))["content-length"] or 0)


def facts_of(workspace: Workspace, path: str, patience_s: float | None = None) -> Facts:
    """A file on a volume; raises Missing."""
    told = workspace.head(FILES + quoted(path), patience_s=patience_s)
    return Facts(int(told["content-length"] or 0), _seconds(told.get("last-modified")))


def sizes(workspace: Workspace, folder: str) -> dict[str, int]:
    """Bytes of every file below a folder of a volume; see `listed`."""
    return {name: facts.size for name, facts in listed(workspace, folder).items()}


def listed(workspace: Workspace, folder: str) -> dict[str, Facts]:
    """Every file below a folder of a volume, by its relative path; nothing when it is not there."""
    found: dict[str, Facts] = {}
    waiting = [folder]
    while waiting:
        for entry in entries(workspace, waiting.pop()):
            if entry.get("is_directory"):
                waiting.append(entry["path"])
            else:
                name = str(PurePosixPath(entry["path"]).relative_to(folder))
                changed = int(entry.get("last_modified") or 0) // 1000
                found[name] = Facts(int(entry.get("file_size") or 0), changed)
    return found


def entries(workspace: Workspace, folder: str) -> list[dict[str, Any]]:
    """What lies in a folder of a volume; empty when it is not there."""
    found: list[dict[str, Any]] = []
    query: dict[str, Any] = {}
    with suppress(Missing):
        while True:
            page = workspace.get(FOLDERS + quoted(folder), query)
            found += page.get("contents") or []
            if not page.get("next_page_token"):
                break
            query = {"page_token": page["next_page_token"]}
    return found


def make_folders(workspace: Workspace, folders: Iterable[str]) -> None:
    """Make folders of a volume with their parents; those that are there stay."""
    for folder in sorted(set(folders)):
        workspace.put(FOLDERS + quoted(folder))


def _read_on(
    workspace: Workspace, source: str, part: Path, goal: int, count: Callable[[int], None]
) -> None:
    """Append to a part what is missing of it; a connection that is cut is no error here."""
    start = part.stat().st_size if part.exists() else 0
    if start > goal:
        part.unlink()
        start = 0
    with part.open("ab") as file:
        if start == goal:
            return
        # requests' errors are OSErrors; what came so far is kept, and the next try goes on there.
        with suppress(OSError), closing(workspace.read(FILES + quoted(source), start)) as stream:
            while chunk := stream.read(_CHUNK):
                file.write(chunk)
                count(len(chunk))


def _seconds(date: str | None) -> int:
    """An HTTP date in Unix seconds."""
    try:
        return int(parsedate_to_datetime(date or "").timestamp())
    except ValueError:
        return 0


def _facts(draft: Path, source: str) -> dict[str, Any]:
    try:
        found = json.loads(draft.read_text(encoding="utf-8"))
        if isinstance(found["files"], dict):
            return dict(found)
    except (ValueError, KeyError, TypeError):
        pass
    raise Transfer(f"{source}/{MANIFEST} is no seal of ours")


def _is_whole(path: Path, entry: Mapping[str, Any]) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == entry["size"]
        and hash_file(path) == entry["xxh3_128"]
    )


def _side_by_side(
    work: Callable[[str], None], names: Iterable[str], at_once: int = AT_ONCE
) -> None:
    """Several at once; the first error ends what has not begun."""
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(work, name) for name in names]
        try:
            for done in waiting:
                done.result()
        except BaseException:
            for other in waiting:
                other.cancel()
            raise
