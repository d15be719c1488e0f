"""The code that travels with a run: one folder, packed with git's own rules.

Without `git:` the working tree as git sees it (tracked and untracked, ignored files left out);
with `git:` the tree of a branch or commit. Files that look like credentials stay behind unless
`include_paths` names them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tunewright.contract.failures import UserError
from tunewright.contract.parts import CodeSource
from tunewright.contract.rundir import hash_file

_CREDENTIALS = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", ".databrickscfg", "id_rsa*", "id_dsa*",
    "id_ecdsa*", "id_ed25519*", ".netrc", ".git-credentials", ".pypirc", "credentials.json",
    "service-account*.json",
)  # fmt: skip
_NEVER = (".git", "._*", "__pycache__")


@dataclass(frozen=True)
class Snapshot:
    """What is packed: files relative to root, their joint hash, and what stayed behind."""

    root: Path
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    credentials: tuple[str, ...]
    sha256: str
    commit: str | None = None
    """The commit to pack instead of the working tree."""

    @property
    def folder(self) -> str:
        return self.root.name


def snapshot(source: CodeSource) -> Snapshot:
    """Look at a code source without packing it; raises UserError when it cannot be packed."""
    root = Path(source.root_path)
    if source.git is not None:
        return _of_commit(root, source)
    listed = _git_files(root)
    everything = set(_walk(root))
    files = everything & listed if listed is not None else everything
    wanted = {f for f in files if _included(f, source.include_paths)}
    secret = {f for f in wanted if _credential(f) and f not in (source.include_paths or ())}
    kept = sorted(wanted - secret)
    if not kept:
        raise UserError(f"code_source: nothing to pack in {root}; see root_path and include_paths")
    left_out = tuple(sorted(everything - wanted))
    return Snapshot(root, tuple(kept), left_out, tuple(sorted(secret)), _digest(root, kept))


def notes(packed: Snapshot) -> list[str]:
    """What a reader should know about a snapshot."""
    found = [f"code: {len(packed.files)} files of {packed.root}"]
    if packed.credentials:
        found.append(
            f"left out, they look like credentials: {_some(packed.credentials)} "
            "(name them in include_paths to pack them)"
        )
    if packed.left_out:
        found.append(f"left out by git's ignore rules or include_paths: {_some(packed.left_out)}")
    return found


def unpack(packed: Snapshot, into: Path) -> Path:
    """The snapshot as a folder below `into`, named like the last part of root_path."""
    place = into / packed.folder
    if place.is_dir():
        return place
    draft = into / f".{packed.folder}.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    if packed.commit:
        _extract(packed, draft)
    else:
        for name in packed.files:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(packed.root / name, draft / name, follow_symlinks=False)
    os.replace(draft, place)
    return place


def commit_of(folder: Path) -> tuple[str | None, bool]:
    """The commit a folder is at and whether its tree differs from it; (None, False) without."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None, False
    status = _git(folder, "status", "--porcelain", "--", ".") or b""
    return head.decode().strip(), bool(status.strip())


def _of_commit(root: Path, source: CodeSource) -> Snapshot:
    assert source.git is not None
    name = source.git.commit or source.git.branch
    found = _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if found is None:
        raise UserError(f"code_source.git: {root} has no branch or commit {name!r}")
    commit = found.decode().strip()
    listing = _git(root, "ls-tree", "-r", "-z", "--name-only", commit, ".") or b""
    every = [name for name in listing.decode().split("\0") if name]
    wanted = [f for f in every if _included(f, source.include_paths)]
    secret = [f for f in wanted if _credential(f) and f not in (source.include_paths or ())]
    kept = sorted(set(wanted) - set(secret))
    if not kept:
        raise UserError(f"code_source: commit {commit[:12]} has nothing to pack below {root}")
    digest = hashlib.sha256("\0".join([commit, *kept]).encode()).hexdigest()
    left_out = tuple(sorted(set(every) - set(wanted)))
    return Snapshot(root, tuple(kept), left_out, tuple(secret), digest, commit)


def _extract(packed: Snapshot, into: Path) -> None:
    assert packed.commit is not None
    archive = _git(packed.root, "archive", "--format=tar", packed.commit, "--", *packed.files)
    if archive is None:
        raise UserError(f"code_source.git: git archive of {packed.commit[:12]} failed")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(into, filter="data")


def _git_files(root: Path) -> set[str] | None:
    """Tracked and untracked files that git does not ignore; None where git cannot tell."""
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", ".")
    return None if listing is None else {name for name in listing.decode().split("\0") if name}


def _git(folder: Path, *words: str) -> bytes | None:
    if shutil.which("git") is None:
        return None
    found = subprocess.run(["git", "-C", str(folder), *words], capture_output=True)
    return found.stdout if found.returncode == 0 else None


def _walk(root: Path) -> Iterable[str]:
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names if not _matches(n, _NEVER)]
        linked = [n for n in names if Path(folder, n).is_symlink()]
        for name in (*files, *linked):
            if not _matches(name, _NEVER):
                yield os.path.relpath(os.path.join(folder, name), root)


def _included(name: str, include: list[str] | None) -> bool:
    return include is None or any(
        name == p.rstrip("/") or name.startswith(p.rstrip("/") + "/") for p in map(_normal, include)
    )


def _normal(path: str) -> str:
    return os.path.normpath(path)


def _credential(name: str) -> bool:
    return _matches(os.path.basename(name), _CREDENTIALS)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _digest(root: Path, files: list[str]) -> str:
    digest = hashlib.sha256()
    for name in files:
        path = root / name
        content = os.readlink(path) if path.is_symlink() else hash_file(path)
        digest.update(f"{name}\0{path.lstat().st_mode:o}\0{content}\n".encode())
    return digest.hexdigest()


def _some(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
