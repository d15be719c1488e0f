"""A user's bad input: one clear sentence, exit 2 or 1, nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.flows.cli import TINY

pytestmark = pytest.mark.flow


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """tiny.yaml with other parameters, in a folder of its own."""

    def changed(**parameters: object) -> Path:
        document = yaml.safe_load(TINY.read_text())
        folder = TINY.parent
        document["parameters"] |= {
            "model_name": str(folder / "model"), "dataset_name": str(folder / "demo.jsonl"),
            **parameters,
        }  # fmt: skip
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return changed


def rows(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def expect_refused(home, file: Path, code: int, *words: str) -> None:
    found = home.run(file)
    assert found.code == code, found.narration
    assert "Traceback" not in found.narration
    for word in words:
        assert word in found.narration
    assert not list(home.path.rglob("model/manifest.json"))
    assert not list(home.path.rglob("tokens/*/manifest.json"))


def test_missing_file(home, tmp_path) -> None:
    expect_refused(home, tmp_path / "none.yaml", 2, "none.yaml does not exist")
    assert not (home.path / "Volumes").exists()


def test_not_yaml(home, tmp_path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("experiment_name: [a\n")
    expect_refused(home, path, 2, "broken.yaml is not valid YAML", "line 2")


def test_all_problems_at_once(home, tiny) -> None:
    expect_refused(home, tiny(max_stepps=1, learning_rate="fast"), 2, "did you mean max_steps?",
            "parameters.learning_rate: must be a number")  # fmt: skip


def test_too_few_gpus_names_the_way_out(home, write) -> None:
    found = home.call("run", str(write("true")), CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 2
    assert "asks for 1 accelerators (GPU_1xH100) and this machine has 0" in found.stderr
    assert "--simulate" in found.stderr


def test_a_missing_secret_names_each_place(home, write) -> None:
    expect_refused(home, write("true", secrets={"MY_TOKEN": "my_scope/tok"}), 2,
            "environment variable MY_TOKEN", "'my-scope-tok'",
            "no Databricks workspace is configured")  # fmt: skip


def test_a_secret_from_a_prefect_block(home, write, prefect_server) -> None:
    from prefect.blocks.system import Secret
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_server}):
        Secret(value="from-the-block").save("my-scope-in-block", overwrite=True)
    found = home.run(
        write('test "$MY_TOKEN" = from-the-block', secrets={"MY_TOKEN": "my_scope/in_block"})
    )
    assert found.code == 0, found.narration


def test_unmet_dependencies_give_the_pip_line(home, write) -> None:
    file = write("true", environment={"dependencies": ["no-such-package>=2", "torch>=2"]})
    expect_refused(
        home, file, 2, "no-such-package>=2 (not installed)", "pip install 'no-such-package>=2'"
    )


def test_an_empty_dataset(home, tiny, tmp_path) -> None:
    expect_refused(home, tiny(dataset_name=rows(tmp_path)), 1, "rows.jsonl")


def test_rows_without_an_answer(home, tiny, tmp_path) -> None:
    good = {"instruction": "Say hello.", "output": "Hello."}
    bad = {"instruction": "Say nothing.", "output": ""}
    expect_refused(
        home, tiny(dataset_name=rows(tmp_path, good, bad)), 1, "row 2", "on_bad_row: drop"
    )


def test_an_unknown_model(home, tiny, tmp_path) -> None:
    expect_refused(home, tiny(model_name=str(tmp_path / "nowhere")), 2, str(tmp_path / "nowhere"))


def test_an_unwritable_volume(home, tiny, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    expect_refused(home, tiny(output_dir=str(tmp_path / "file" / "runs")), 2, "cannot be written")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(home, tiny, full_disk) -> None:
    found = home.run(tiny(output_dir=str(full_disk), max_steps=2, save_steps=1))
    assert found.code == 1, found.narration
    assert "No space left on device" in found.narration
    assert "Traceback" not in found.narration.split("launch")[0]
    assert found.facts.get("registered") is None
    assert not list(full_disk.rglob("model/manifest.json"))
