"""What travels to the platform: the user's snapshot and tunewright itself, named by content.

Both are built so that the same content gives the same bytes: what is there already under its name
is not sent again.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import tunewright
from tunewright.contract.rundir import home

WORKSPACE_LIMIT = 480 << 20
"""Bytes of one file in a workspace: the platform's 500 MB, with room for how it counts."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Archive:
    """One file to send: its name, and its bytes or where they lie; None before it is built."""

    name: str
    content: bytes | Path | None = field(repr=False)
    size: int

    @property
    def fits_workspace(self) -> bool:
        return self.size <= WORKSPACE_LIMIT


def snapshot(folder: Path, *, build: bool = True) -> Archive:
    """An unpacked snapshot, `…/<hash>/<folder>`, as a tar with that one folder at the top.

    Without `build` nothing is written; its size then tells where it would go.
    """
    name = f"{folder.name}_{folder.parent.name}.tar.gz"
    if not build:
        return Archive(name, None, _size_packed(folder))
    place = home() / "cache" / "databricks" / name
    if not place.is_file():
        _pack(folder, place)
    return Archive(name, place, place.stat().st_size)


def wheel() -> Archive:
    """tunewright as a wheel, built from the package in use; its version ends with its hash."""
    package = Path(tunewright.__file__).parent
    files = {f"tunewright/{name}": (package / name).read_bytes() for name in _sources(package)}
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    version = f"{tunewright.__version__}+{digest.hexdigest()[:12]}"
    info = f"tunewright-{version}.dist-info"
    files[f"{info}/METADATA"] = _metadata(version).encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: tunewright\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD").encode()
    content = _zip(files)
    return Archive(f"tunewright-{version}-py3-none-any.whl", content, len(content))


def recipe_requirements() -> list[str]:
    """What our recipes need beside tunewright itself, each without a space.

    Empty where tunewright is not installed as a distribution.
    """
    try:
        every = metadata.requires("tunewright") or []
    except metadata.PackageNotFoundError:
        return []
    split = (line.partition(";") for line in every)
    marked = [(line, mark) for line, _, mark in split if "extra" in mark]
    return sorted({line.replace(" ", "") for line, mark in marked if _names_train(mark)})


def _names_train(marker: str) -> bool:
    return "'train'" in marker or '"train"' in marker


def _size_packed(folder: Path) -> int:
    """Bytes of the archive; where even the plain files fit, of these, and nothing is packed."""
    plain = sum(path.lstat().st_size + 2 * tarfile.BLOCKSIZE for path in folder.rglob("*"))
    if plain <= WORKSPACE_LIMIT:
        return plain
    counter = _Counter()
    _write(folder, counter)
    return counter.count


class _Counter(io.RawIOBase):
    """Takes bytes and keeps only their number."""

    def __init__(self) -> None:
        self.count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.count += len(data)
        return len(data)


def _pack(folder: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            _write(folder, file)
        os.replace(draft, place)
    finally:
        draft.unlink(missing_ok=True)


def _write(folder: Path, file: Any) -> None:
    """A gzipped tar without owners and times; symbolic links stay links."""
    with (
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted([folder, *folder.rglob("*")]):
            arcname = str(Path(folder.name, path.relative_to(folder)))
            tar.add(path, arcname, recursive=False, filter=_plain)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _sources(package: Path) -> Iterator[str]:
    """The package's own files, sorted; nothing that Python or an editor left there."""
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package)
        if path.is_file() and not any(p.startswith((".", "__pycache__")) for p in name.parts):
            yield name.as_posix()


def _metadata(version: str) -> str:
    """What pip must know: the light requirements, and those of the extras."""
    try:
        needs = metadata.requires("tunewright") or []
    except metadata.PackageNotFoundError:
        needs = ["pydantic>=2.10", "pyyaml>=6", "psutil>=5.9", "xxhash>=3.4"]
    extras = sorted({m.split("'")[1] for n in needs if "extra ==" in (m := n.replace('"', "'"))})
    lines = ["Metadata-Version: 2.1", "Name: tunewright", f"Version: {version}"]
    lines += [*(f"Provides-Extra: {extra}" for extra in extras), "Requires-Python: >=3.11"]
    return "\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs)]) + "\n"


def _record(files: dict[str, bytes], own: str) -> str:
    lines = []
    for name, content in files.items():
        digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    return "\n".join([*lines, f"{own},,"]) + "\n"


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return buffer.getvalue()
