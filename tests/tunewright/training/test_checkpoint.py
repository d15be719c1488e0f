"""What happens to the folders; saving and resuming themselves are tested with the recipe."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tunewright.contract import rundir
from tunewright.contract.rundir import RunDir
from tunewright.training.checkpoint import prune, remove
from tunewright.training.hf_folder import write_hf_folder


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path / "run")


def write(run: RunDir, step: int, *, sealed: bool = True):
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_text("weights")
    if sealed:
        rundir.seal(folder, {"step": step})
    return folder


def left(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_the_newest_sealed_ones_are_kept(run):
    for step in (5, 10, 15):
        write(run, step)
    prune(run.checkpoints, keep=2)
    assert left(run) == ["step-00000010", "step-00000015"]


def test_unsealed_leftovers_before_the_newest_go_and_later_ones_stay(run):
    write(run, 5, sealed=False)
    write(run, 10)
    write(run, 15, sealed=False)
    prune(run.checkpoints, keep=3)
    assert left(run) == ["step-00000010", "step-00000015"]


def test_what_is_not_ours_stays(run):
    write(run, 5)
    (run.checkpoints / "step-0000-mine").mkdir()
    (run.checkpoints / "step-00000003").write_text("a file")
    for step in (10, 15):
        write(run, step)
    prune(run.checkpoints, keep=1)
    assert left(run) == ["step-0000-mine", "step-00000003", "step-00000015"]


def test_without_a_sealed_one_nothing_is_removed(run):
    write(run, 5, sealed=False)
    prune(run.checkpoints, keep=1)
    assert left(run) == ["step-00000005"]


def test_a_folder_that_cannot_be_removed_whole_has_lost_its_seal(run, monkeypatch):
    folder = write(run, 5)

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove(folder)
    assert folder.is_dir()
    assert not rundir.is_sealed(folder)


class TestHfFolder:
    def base(self, model_folder, **files):
        base = model_folder()
        for name, text in files.items():
            (base / name.replace("__", ".")).write_text(text)
        return base, AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))

    def test_the_tokenizer_is_copied_as_it_is_and_weights_are_not(self, model_folder, tmp_path):
        base, model = self.base(
            model_folder,
            tokenizer__json='{"a": "ü\\n"}\n\n',
            chat_template__jinja="{{ x }}\n",
            model__safetensors="no",
            README__md="no",
        )
        write_hf_folder(tmp_path / "hf", base, model, "bfloat16")
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (tmp_path / "hf" / name).read_bytes() == (base / name).read_bytes()
        assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
        ]

    def test_the_config_says_the_type_of_the_weights_and_keeps_the_rest(
        self, model_folder, tmp_path
    ):
        base, model = self.base(model_folder)
        before = json.loads((base / "config.json").read_text())
        before |= {"torch_dtype": "float32", "something_of_theirs": 1}
        (base / "config.json").write_text(json.dumps(before))
        write_hf_folder(tmp_path / "hf", base, model, "float16")
        after = json.loads((tmp_path / "hf" / "config.json").read_text())
        before.pop("torch_dtype")
        assert after == before | {"dtype": "float16", "architectures": ["LlamaForCausalLM"]}

    def test_a_generation_config_is_copied_or_made(self, model_folder, tmp_path):
        base, model = self.base(model_folder)
        write_hf_folder(tmp_path / "made", base, model, "float16")
        made = json.loads((tmp_path / "made" / "generation_config.json").read_text())
        assert made["eos_token_id"] == 2
        (base / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
        write_hf_folder(tmp_path / "copied", base, model, "float16")
        copied = (tmp_path / "copied" / "generation_config.json").read_text()
        assert copied == '{"eos_token_id": [2, 3]}'

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({}, "trained with"),
            ({"chat_template__jinja": "own"}, "own"),
            ({"tokenizer_config__json": '{"chat_template": "own"}'}, None),
        ],
    )
    def test_the_template_of_the_rows_is_written_where_there_is_none(
        self, model_folder, tmp_path, files, expected
    ):
        base, model = self.base(model_folder, **files)
        write_hf_folder(tmp_path / "hf", base, model, "float16", "trained with")
        path = tmp_path / "hf" / "chat_template.jinja"
        assert (path.read_text() if path.exists() else None) == expected
