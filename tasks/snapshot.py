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
    "id_ecdsa*", "id_ed25519*", ".netrc", ".git-credentials", ".pypirc", ".npmrc", "credentials",
    "credentials.json",
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
    listed, everything = _git_files(root), set(_walk(root))
    named = everything & {_normal(path) for path in source.include_paths or ()}
    # A file that include_paths names is meant, whatever git ignores.
    files = everything if listed is None else everything & (listed | named)
    kept, secret = _chosen(root, files, source)
    left_out = tuple(sorted(everything - set(kept) - set(secret)))
    return Snapshot(root, tuple(kept), left_out, tuple(secret), _digest(root, kept))


def _chosen(root: Path, files: set[str], source: CodeSource) -> tuple[list[str], list[str]]:
    """The files to pack, and those left out because they look like credentials; both sorted."""
    include = None if source.include_paths is None else [_normal(p) for p in source.include_paths]
    for path in include or ():
        if not any(_is_below(name, path) for name in files):
            raise UserError(
                f"code_source.include_paths: {path!r} is nothing that can be packed in {root}; "
                "it is missing, empty, or ignored by git"
            )
    wanted = {f for f in files if include is None or any(_is_below(f, p) for p in include)}
    secret = {f for f in wanted if _credential(f) and f not in (include or ())}
    if not wanted - secret:
        raise UserError(
            f"code_source: nothing to pack in {root}; "
            "see root_path, include_paths and what git ignores there"
        )
    return sorted(wanted - secret), sorted(secret)


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
    try:
        _copy(packed, draft)
        os.replace(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def _copy(packed: Snapshot, draft: Path) -> None:
    if packed.commit:
        _extract(packed, draft)
        return
    try:
        for name in packed.files:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(packed.root / name, draft / name, follow_symlinks=False)
        same = _digest(draft, packed.files) == packed.sha256
    except FileNotFoundError:
        same = False
    if not same:
        raise UserError(f"code_source: {packed.root} changed while it was packed; start again")


def commit_of(place: Snapshot | Path) -> tuple[str | None, bool]:
    """The commit of a snapshot or folder, and whether its tree differs; (None, False) without."""
    if isinstance(place, Snapshot) and place.commit:
        return place.commit, False
    folder = place.root if isinstance(place, Snapshot) else place
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None, False
    status = _git(folder, "status", "--porcelain", "--", ".") or b""
    return head.decode().strip(), bool(status.strip())


def _of_commit(root: Path, source: CodeSource) -> Snapshot:
    assert source.git is not None
    name = source.git.commit or source.git.branch
    found = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if found is None:
        raise UserError(f"code_source.git: {root} has no branch or commit {name!r}")
    commit = found.decode().strip()
    listing = _git(root, "ls-tree", "-r", "-z", commit, ".") or b""
    entries = (entry.partition("\t") for entry in os.fsdecode(listing).split("\0") if entry)
    # A submodule is a commit in the tree, not a file of it.
    every = {name for facts, _, name in entries if facts.split()[1] == "blob"}
    kept, secret = _chosen(root, every, source)
    digest = hashlib.sha256(os.fsencode("\0".join([commit, *kept]))).hexdigest()
    left_out = tuple(sorted(every - set(kept) - set(secret)))
    return Snapshot(root, tuple(kept), left_out, tuple(secret), digest, commit)


def _extract(packed: Snapshot, into: Path) -> None:
    assert packed.commit is not None
    archive = _git(packed.root, "archive", "--format=tar", packed.commit)
    if archive is None:
        raise UserError(f"code_source.git: git archive of {packed.commit[:12]} failed")
    names = set(packed.files)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            members = [member for member in tar if member.name in names]
            tar.extractall(into, members=members, filter="data")
    except tarfile.TarError as error:
        raise UserError(
            f"code_source.git: {packed.commit[:12]} cannot be packed: {error}"
        ) from None
    if lost := sorted(names - {member.name for member in members}):
        raise UserError(
            f"code_source.git: git archive leaves out {_some(lost)} (export-ignore in "
            ".gitattributes); name what you need in include_paths"
        )


def _git_files(root: Path) -> set[str] | None:
    """Tracked and untracked files that git does not ignore; None outside a repository.

    Raises UserError when there is a repository that git cannot read: without its rules, what is
    to stay at home would be packed.
    """
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", ".")
    if listing is not None:
        return {name for name in os.fsdecode(listing).split("\0") if name}
    repository = next((p for p in (root, *root.parents) if (p / ".git").exists()), None)
    if repository is None:
        return None
    raise UserError(
        f"code_source: git is missing or cannot read the repository {repository}, so what it "
        f"ignores is not known; try `git -C {root} status`"
    )


def _git(folder: Path, *words: str) -> bytes | None:
    if shutil.which("git") is None:
        return None
    # Looking at a user's repository must not take its locks.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    found = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, env=env)
    return found.stdout if found.returncode == 0 else None


def _walk(root: Path) -> Iterable[str]:
    """Every file and symbolic link below a folder; pipes and sockets are no code."""
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names if not _matches(n, _NEVER)]
        for name in (*files, *names):
            path = Path(folder, name)
            linked = path.is_symlink()
            if not _matches(name, _NEVER) and (linked or (name in files and path.is_file())):
                yield os.path.relpath(path, root)


def _is_below(name: str, path: str) -> bool:
    return path == "." or name == path or name.startswith(f"{path}/")


def _normal(path: str) -> str:
    return os.path.normpath(path)


def _credential(name: str) -> bool:
    return _matches(os.path.basename(name), _CREDENTIALS)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns)


def _digest(root: Path, files: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in files:
        path = root / name
        content = os.readlink(path) if path.is_symlink() else hash_file(path)
        digest.update(os.fsencode(f"{name}\0{path.lstat().st_mode:o}\0{content}\n"))
    return digest.hexdigest()


def _some(names: Iterable[str], most: int = 8) -> str:
    names = [name if name.isprintable() else ascii(name) for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
