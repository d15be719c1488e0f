"""/Volumes on a machine that has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import volumes
from tunewright.contract.workload import Workload

COMPUTE = {"num_accelerators": 1, "accelerator_type": "GPU_1xH100"}
BASE = {"experiment_name": "tiny", "command": "true", "compute": COMPUTE}


def load(**fields) -> Workload:
    return Workload.load({**BASE, **fields})


def test_every_string_that_starts_with_volumes_is_mapped(home):
    given = {
        "a": "/Volumes/c/s/v/x",
        "b": ["/Volumes/c/s/v", 5, None, "a /Volumes/x"],
        "c": True,
        "d": {"/Volumes/key": "/Volumes2/x", "e": "dbfs:/Volumes/x", "f": "/volumes/x"},
    }
    assert volumes.mapped(given) == {
        "a": f"{home}/Volumes/c/s/v/x",
        "b": [f"{home}/Volumes/c/s/v", 5, None, "a /Volumes/x"],
        "c": True,
        "d": {"/Volumes/key": "/Volumes2/x", "e": "dbfs:/Volumes/x", "f": "/volumes/x"},
    }


def test_a_volume_that_is_mounted_is_left_alone(home, tmp_path, monkeypatch):
    mounted = tmp_path / "mnt" / "c" / "s" / "v"
    mounted.mkdir(parents=True)
    real = Path.is_dir
    monkeypatch.setattr(
        Path, "is_dir",
        lambda path: real(Path(str(path).replace("/Volumes/", f"{tmp_path}/mnt/", 1))),
    )  # fmt: skip
    assert volumes.mapped("/Volumes/c/s/v/deep/x") == "/Volumes/c/s/v/deep/x"
    assert volumes.mapped("/Volumes/c/s/other/x") == f"{home}/Volumes/c/s/other/x"


def test_where_runs_are(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert volumes.output_root(load()) == home / "Volumes" / "runs" / "tiny"
    for given, root in (
        ("/Volumes/c/s/v/runs", home / "Volumes/c/s/v/runs"),
        ("/data/runs", Path("/data/runs")),
        ("~/runs", Path("/home/me/runs")),
        ("./runs", tmp_path / "runs"),
        ("runs", tmp_path / "runs"),
    ):
        assert volumes.output_root(load(parameters={"output_dir": given})) == root


def test_what_is_mapped_and_what_is_not_is_said(home):
    assert volumes.notes(load()) == []
    (note,) = volumes.notes(load(parameters={"x": ["/Volumes/c/s/v"]}))
    assert note == f"/Volumes is not mounted here: parameters use {home}/Volumes instead"
    for field in ({"command": "ls /Volumes/c/s/v"}, {"env_variables": {"X": "/Volumes/c/s/v"}}):
        workload = load(**field)
        (note,) = volumes.notes(workload)
        assert note == "/Volumes/c/s/v is in command or env_variables, which are not rewritten"


@pytest.mark.parametrize("command", ["ls /Volumesx", "true"])
def test_nothing_to_say(home, command):
    assert volumes.notes(load(command=command)) == []
