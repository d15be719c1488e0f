"""What of a folder travels with a run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tasks.snapshot import commit_of, notes, snapshot, unpack
from tunewright.contract.failures import UserError
from tunewright.contract.parts import CodeSource, Git

ODD_NAMES = [
    "with space.py",
    "line\nend.py",
    "ünï.py",
    "-dash.py",
    "*star.py",
    ":colon.py",
    "q'u\"o.py",
]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with files of every sort."""
    root = tmp_path / "my code"
    for name in ("train.py", "sub/deep/x.py", "data/rows.jsonl", ".env", "sub/key.pem", *ODD_NAMES):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}")
    (root / "run.sh").write_text("#!/bin/sh")
    (root / "run.sh").chmod(0o755)
    (root / "link.py").symlink_to("train.py")
    (root / "broken").symlink_to("nowhere")
    (root / "folder").symlink_to("sub")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "train.pyc").touch()
    (root / "._train.py").touch()
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture
def repository(code: Path, git) -> Path:
    (code / ".gitignore").write_text("data/\n*.log\n.env\n")
    git(code, "init")
    git(code, "add", "train.py", "sub", ".gitignore", "run.sh", "link.py")
    git(code, "commit", "-m", "first")
    (code / "out.log").write_text("ignored")
    (code / "new.py").write_text("untracked")
    return code


def source(root: Path, **more) -> CodeSource:
    return CodeSource.model_construct(
        root_path=str(root), **{"include_paths": None, "git": None, **more}
    )


EVERYTHING = {
    "train.py", "sub/deep/x.py", "data/rows.jsonl", "run.sh", "link.py", "broken", "folder",
    *ODD_NAMES,
}  # fmt: skip


def test_a_folder_without_git(code):
    found = snapshot(source(code))
    assert set(found.files) == EVERYTHING
    assert found.files == tuple(sorted(found.files))
    assert found.credentials == (".env", "sub/key.pem")
    assert found.left_out == ()
    assert found.folder == "my code"


def test_git_s_ignore_rules_and_untracked_files(repository):
    found = snapshot(source(repository))
    assert set(found.files) == EVERYTHING - {"data/rows.jsonl"} | {".gitignore", "new.py"}
    assert found.left_out == (".env", "data/rows.jsonl", "out.log")
    assert found.credentials == ("sub/key.pem",)


def test_a_file_that_was_deleted_but_not_from_git(repository):
    (repository / "train.py").unlink()
    assert "train.py" not in snapshot(source(repository)).files


def test_a_folder_inside_a_repository(repository):
    found = snapshot(source(repository / "sub"))
    assert (found.files, found.folder) == (("deep/x.py",), "sub")


@pytest.mark.parametrize(
    "name",
    [".env", ".env.local", ".ENV", "a.pem", "A.PEM", ".databrickscfg", "id_rsa", "id_ed25519.pub",
     ".netrc", ".npmrc", ".pypirc", "credentials", "tls.key", "service-account-x.json"],
)  # fmt: skip
def test_what_looks_like_credentials_stays_and_is_said(name, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).touch()
    (tmp_path / "train.py").touch()
    found = snapshot(source(tmp_path))
    assert (found.files, found.credentials) == (("train.py",), (f"a/{name}",))
    assert any(f"look like credentials: a/{name}" in note for note in notes(found))
    named = snapshot(source(tmp_path, include_paths=["train.py", f"./a/{name}"]))
    assert named.files == tuple(sorted([f"a/{name}", "train.py"]))
    assert named.credentials == ()
    assert snapshot(source(tmp_path, include_paths=["."])).credentials == (f"a/{name}",)


def test_a_credential_that_git_ignores_travels_when_it_is_named(repository):
    found = snapshot(source(repository, include_paths=[".env", "train.py"]))
    assert found.files == (".env", "train.py")


def test_include_paths(code):
    assert snapshot(source(code, include_paths=["sub/"])).files == ("sub/deep/x.py",)
    assert snapshot(source(code, include_paths=["./sub/deep", "train.py"])).files == (
        "sub/deep/x.py",
        "train.py",
    )
    assert set(snapshot(source(code, include_paths=["."])).files) == EVERYTHING
    part = snapshot(source(code, include_paths=["data"]))
    assert "train.py" in part.left_out
    assert any(
        note.startswith("left out by git's ignore rules or include_p") for note in notes(part)
    )


@pytest.mark.parametrize("path", ["sb", "train", "sub/dee", "train.py/x"])
def test_a_path_that_names_nothing_is_told(code, path):
    with pytest.raises(UserError, match=f"'{path}' is nothing that can be packed"):
        snapshot(source(code, include_paths=["train.py", path]))


def test_nothing_to_pack(tmp_path):
    with pytest.raises(UserError, match="nothing to pack in"):
        snapshot(source(tmp_path))
    (tmp_path / ".env").touch()
    with pytest.raises(UserError, match="nothing to pack in"):
        snapshot(source(tmp_path))


def test_a_repository_that_git_cannot_read_is_refused(repository, monkeypatch):
    """Without git's rules, what is ignored (data, secrets) would travel."""
    (repository / ".git" / "HEAD").write_text("broken")
    with pytest.raises(UserError, match="what it ignores is not known"):
        snapshot(source(repository))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="what it ignores is not known"):
        snapshot(source(repository / "sub"))


def test_the_hash_follows_names_contents_modes_and_links(code):
    def digest() -> str:
        return snapshot(source(code)).sha256

    seen = [digest()]
    assert digest() == seen[0]
    os.utime(code / "train.py", (0, 0))
    assert digest() == seen[0]
    for change in (
        lambda: (code / "train.py").write_text("other"),
        lambda: (code / "train.py").rename(code / "train2.py"),
        lambda: (code / "run.sh").chmod(0o644),
        lambda: ((code / "broken").unlink(), (code / "broken").symlink_to("elsewhere")),
        lambda: (code / "more.py").touch(),
    ):
        change()
        seen.append(digest())
    assert len(set(seen)) == 6


def test_unpacked_it_is_one_folder_named_as_the_root(repository, tmp_path):
    packed = snapshot(source(repository))
    into = tmp_path / "run" / "code"
    place = unpack(packed, into)
    assert place == into / "my code"
    assert os.listdir(into) == ["my code"]
    files = {os.path.relpath(os.path.join(d, f), place) for d, _, fs in os.walk(place) for f in fs}
    links = {"folder"}
    assert files | links == set(packed.files)
    for name in ODD_NAMES:
        assert (place / name).read_text() == f"content of {name}"
    assert os.access(place / "run.sh", os.X_OK)
    assert (place / "link.py").is_symlink()
    assert os.readlink(place / "broken") == "nowhere"


def test_unpacked_twice_it_is_as_it_was(code, tmp_path):
    packed = snapshot(source(code))
    place = unpack(packed, tmp_path / "into")
    (place / "made by the command").touch()
    assert unpack(packed, tmp_path / "into") == place
    assert (place / "made by the command").exists()


def test_unpacked_half_it_is_unpacked_again(code, tmp_path):
    packed, into = snapshot(source(code)), tmp_path / "into"
    half = into / f".{packed.folder}.{os.getpid()}"
    half.mkdir(parents=True)
    (half / "old").touch()
    place = unpack(packed, into)
    assert not (place / "old").exists()
    assert os.listdir(into) == ["my code"]


@pytest.mark.parametrize("change", ["write", "remove"])
def test_a_folder_that_changed_meanwhile_is_not_packed(code, tmp_path, change):
    packed = snapshot(source(code))
    (code / "train.py").write_text("edited") if change == "write" else (code / "train.py").unlink()
    with pytest.raises(UserError, match="changed while it was packed; start again"):
        unpack(packed, tmp_path / "into")
    assert os.listdir(tmp_path / "into") == []


def test_a_name_that_is_no_utf8(tmp_path):
    root = tmp_path / "code"
    root.mkdir()
    Path(os.fsdecode(os.fsencode(root) + b"/tok\xe9n.py")).write_text("x")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    packed = snapshot(source(root))
    place = unpack(packed, tmp_path / "into")
    assert os.listdir(os.fsencode(place)) == [b"tok\xe9n.py"]
    "\n".join(notes(snapshot(source(root, include_paths=["."])))).encode()


# A branch or commit


def test_a_commit_is_packed_as_it_was(repository, git, tmp_path):
    commit = git(repository, "rev-parse", "HEAD")
    git(repository, "branch", "old")
    (repository / "train.py").write_text("edited")
    git(repository, "commit", "-am", "second")
    for named in (Git(commit=commit), Git(commit=commit[:10]), Git(branch="old")):
        packed = snapshot(source(repository, git=named))
        assert (packed.commit, set(packed.files)) == (
            commit,
            {"train.py", "sub/deep/x.py", ".gitignore", "run.sh", "link.py"},
        )
        assert packed.credentials == ("sub/key.pem",)
    place = unpack(packed, tmp_path / "into")
    assert (place / "train.py").read_text() == "content of train.py"
    assert not (place / "sub" / "key.pem").exists()
    assert (place / "link.py").is_symlink()


def test_a_commit_of_a_folder_inside_a_repository(repository, git, tmp_path):
    packed = snapshot(source(repository / "sub", git=Git(branch="main")))
    assert packed.files == ("deep/x.py",)
    place = unpack(packed, tmp_path / "into")
    assert (place / "deep" / "x.py").read_text() == "content of sub/deep/x.py"


def test_a_commit_with_odd_names_and_include_paths(repository, git, tmp_path):
    git(repository, "add", "-f", ".")
    git(repository, "commit", "-m", "all")
    packed = snapshot(
        source(repository, git=Git(branch="main"), include_paths=[*ODD_NAMES, ".env"])
    )
    assert set(packed.files) == {*ODD_NAMES, ".env"}
    place = unpack(packed, tmp_path / "into")
    assert {name for name in os.listdir(place)} == {*ODD_NAMES, ".env"}


@pytest.mark.parametrize("name", ["nope", "--help", "HEAD:train.py", ""])
def test_a_commit_that_is_not_there(repository, name):
    with pytest.raises(UserError, match="has no branch or commit"):
        snapshot(source(repository, git=Git(branch=name)))


def test_a_branch_of_a_folder_without_git(code):
    with pytest.raises(UserError, match="has no branch or commit 'main'"):
        snapshot(source(code, git=Git(branch="main")))


def test_a_file_that_git_archive_leaves_out_is_told(repository, git, tmp_path):
    (repository / ".gitattributes").write_text("train.py export-ignore\n")
    git(repository, "add", ".gitattributes")
    git(repository, "commit", "-m", "attributes")
    with pytest.raises(UserError, match=r"leaves out train\.py \(export-ignore"):
        unpack(snapshot(source(repository, git=Git(branch="main"))), tmp_path / "into")


def test_a_link_out_of_the_tree_is_refused_in_a_commit(repository, git, tmp_path):
    (repository / "out").symlink_to("/etc/passwd")
    git(repository, "add", "out")
    git(repository, "commit", "-m", "link")
    with pytest.raises(UserError, match="cannot be packed"):
        unpack(snapshot(source(repository, git=Git(branch="main"))), tmp_path / "into")


def test_the_commit_a_folder_is_at(repository, code, git, tmp_path):
    commit = git(repository, "rev-parse", "HEAD")
    git(repository, "stash", "--include-untracked")
    assert commit_of(repository) == (commit, False)
    (repository / "train.py").write_text("edited")
    assert commit_of(repository) == (commit, True)
    assert commit_of(repository / "sub") == (commit, False)
    (tmp_path / "plain").mkdir()
    assert commit_of(tmp_path / "plain") == (None, False)
