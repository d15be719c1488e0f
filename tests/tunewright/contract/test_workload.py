"""Every field and rule of the workload file: what is taken, and where and how the rest is told."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tunewright.contract.failures import UserError, WorkloadError
from tunewright.contract.workload import RESERVED_VARIABLES, Workload, recipe_of

COMPUTE = {"num_accelerators": 16, "accelerator_type": "GPU_8xH100"}
BASE = {"experiment_name": "tiny", "command": "python train.py", "compute": COMPUTE}
OURS = "torchrun -m tunewright.recipes.fsdp"
ROWS = {"model_name": "a/b", "dataset_name": "c/d"}
UUID = "01234567-89ab-cdef-0123-456789abcdef"
JARGON = re.compile(
    r"pydantic|Input should|Value error|String should|Field required|NoneType|\[key\]|\bdict\b|"
    r"\bNone\b|Extra inputs|validation|Traceback|errors\.pydantic|recursion",
    re.IGNORECASE,
)


def load(overrides=None, **fields) -> Workload:
    return Workload.load({**BASE, **fields}, overrides)


def problems(overrides=None, **fields) -> list[tuple[str, str]]:
    with pytest.raises(WorkloadError) as error:
        load(overrides, **fields)
    found = [tuple(problem) for problem in error.value.problems]
    for path, message in found:
        assert not JARGON.search(f"{path} {message}"), message
        assert "\n" not in message
    return found


def compute(**more) -> dict:
    return {"compute": {**COMPUTE, **more}}


def snapshot(**more) -> dict:
    return {"code_source": {"type": "snapshot", "snapshot": {"root_path": ".", **more}}}


def ours(**more) -> dict:
    return {"command": OURS, "parameters": {**ROWS, **more}}


# Single fields

VALID = [
    {"experiment_name": "A-b_9"},
    {"experiment_name": "a" * 100},
    {"command": "echo ${HOME} $(date)\n" * 1000},
    compute(num_accelerators=8),
    compute(num_accelerators=3, accelerator_type="GPU_1xA10"),
    compute(num_accelerators=24, accelerator_type="GPU_8xB300"),
    compute(pool_id="p", provisioned_capacity_id="c", priority_class="BEST_EFFORT"),
    compute(pool_id=None),
    {"environment": {"version": 4, "dependencies": ["trl>=1.1", "-r more.txt"]}},
    {"environment": {"version": "AI5"}},
    {"environment": {"version": "DataBricks_AI_v6"}},
    {"environment": {"dependencies": None}},
    {"environment": None},
    {"environment": {"docker_image": {"url": "registry/image:1"}}},
    {"environment": {"unity_catalog_image": "main.images.train"}},
    {"code_source": {"root_path": ".", "include_paths": ["src", "a/b.py"]}},
    snapshot(remote_volume="/Volumes/a/b/c", git={"commit": "abc"}),
    {"env_variables": {"NCCL_DEBUG": "INFO", "_X1": "", "HF_HOME": "/tmp"}},
    {"secrets": {"HF_TOKEN": "my_scope/hf_token", "B": "a.b-c/" + "k" * 128}},
    {"parameters": {"anything": [{"deep": None}], "x": 1e-5}},
    {"max_retries": 0},
    {"timeout_minutes": 1},
    {"idempotency_token": "t" * 64},
    {"mlflow_run_name": "run_1"},
    {"mlflow_experiment_directory": "/Workspace/Users/a@b.c"},
    {"mlflow_artifact_location": "s3://bucket/x"},
    {"permissions": [{"user_name": "a@b.c", "level": "CAN_VIEW"}]},
    {"permissions": [{"service_principal_name": UUID, "level": "CAN_MANAGE"}]},
    {"usage_policy_id": UUID},
    {"usage_policy_name": "team"},
]


@pytest.mark.parametrize("fields", VALID, ids=str)
def test_valid(fields):
    load(**copy.deepcopy(fields))


TEXT, NUMBER, MAPPING, LIST = (
    "must be text",
    "must be a whole number",
    "must be a mapping",
    "a list",
)
REQUIRED = "is required; add it"
INVALID = [
    ({"experiment_name": "a\n"}, "experiment_name", "without spaces or line ends"),
    ({"experiment_name": ""}, "experiment_name", "1 to 100 ASCII"),
    ({"experiment_name": "a" * 101}, "experiment_name", "1 to 100 ASCII"),
    ({"experiment_name": "é"}, "experiment_name", "ASCII"),
    ({"experiment_name": "a b"}, "experiment_name", "without spaces"),
    ({"experiment_name": 7}, "experiment_name", f"{TEXT}; put quotes around it (found 7)"),
    ({"experiment_name": True}, "experiment_name", "put quotes around it (found true)"),
    ({"experiment_name": None}, "experiment_name", REQUIRED),
    ({"command": " \n"}, "command", "must not be blank"),
    ({"command": "true\n" * 1001}, "command", "has 1001 lines, at most 1,000"),
    ({"command": "x" * 130_000}, "command", "has 130,000 bytes, at most 128,000"),
    ({"command": "a\0b"}, "command", "NUL byte"),
    ({"command": ["python", "train.py"]}, "command", TEXT),
    ({"command": None}, "command", REQUIRED),
    ({"compute": None}, "compute", REQUIRED),
    ({"compute": "GPU_8xH100"}, "compute", MAPPING),
    ({"compute": []}, "compute", MAPPING),
    (compute(num_accelerators="16"), "compute.num_accelerators", f"{NUMBER} (found '16')"),
    (compute(num_accelerators=True), "compute.num_accelerators", f"{NUMBER} (found true)"),
    (compute(num_accelerators=8.0), "compute.num_accelerators", NUMBER),
    (compute(num_accelerators=12), "compute.num_accelerators", "positive multiple of 8"),
    (compute(num_accelerators=0), "compute.num_accelerators", "positive multiple of 8"),
    (compute(num_accelerators=-8), "compute.num_accelerators", "positive multiple of 8"),
    (compute(num_accelerators=None), "compute.num_accelerators", REQUIRED),
    (compute(accelerator_type="gpu_8xh100"), "compute.accelerator_type", "must be written GPU_8x"),
    (compute(accelerator_type="GPU_8XH100"), "compute.accelerator_type", "must be written GPU_8x"),
    (compute(accelerator_type="H100"), "compute.accelerator_type", "of the form GPU_<n>x<name>"),
    (compute(accelerator_type="GPU_0xH1"), "compute.accelerator_type", "not of the form"),
    (compute(accelerator_type=8), "compute.accelerator_type", TEXT),
    (compute(priority_class="NORMAL"), "compute.priority_class", "provisioned_capacity_id is not"),
    (compute(priority_class="high", provisioned_capacity_id="c"), "compute.priority_class",
     "must be BEST_EFFORT, NORMAL or CRITICAL (found 'high')"),
    (compute(pool_id=3), "compute.pool_id", TEXT),
    ({"environment": ["torch"]}, "environment", MAPPING),
    ({"environment": {"version": "v4"}}, "environment.version", "databricks_ai_v<N>"),
    ({"environment": {"version": 4.1}}, "environment.version", "is not a version"),
    ({"environment": {"version": True}}, "environment.version", "is not a version"),
    ({"environment": {"version": "4\n"}}, "environment.version", "is not a version"),
    ({"environment": {"version": []}}, "environment.version", "is not a version"),
    ({"environment": {"dependencies": {"a": 1}}}, "environment.dependencies", LIST),
    ({"environment": {"dependencies": ["a", 1]}}, "environment.dependencies.1", TEXT),
    ({"environment": {"dependencies": "nowhere.yaml"}}, "environment.dependencies", "nowhere.yaml"),
    ({"environment": {"docker_image": "x"}}, "environment.docker_image", MAPPING),
    ({"environment": {"docker_image": {"url": ""}}}, "environment.docker_image.url", "be empty"),
    ({"environment": {"docker_image": {"tag": "a"}}}, "environment.docker_image.url", REQUIRED),
    ({"environment": {"docker_image": {"url": "a"}, "version": 4}}, "environment.version",
     "docker_image and version are both set"),
    ({"environment": {"unity_catalog_image": "a", "dependencies": []}}, "environment.dependencies",
     "unity_catalog_image and dependencies are both set"),
    ({"environment": {"unity_catalog_image": "a", "docker_image": {"url": "b"}}},
     "environment.unity_catalog_image", "keep one"),
    ({"code_source": "."}, "code_source", MAPPING),
    ({"code_source": {"type": "git", "root_path": "."}}, "code_source.type", "must be snapshot"),
    ({"code_source": {"type": "snapshot"}}, "code_source.root_path", REQUIRED),
    ({"code_source": {"type": "snapshot", "snapshot": None}}, "code_source.snapshot.root_path",
     REQUIRED),
    ({"code_source": {"snapshot": [1]}}, "code_source", "mapping with root_path"),
    ({"code_source": {"root_path": ".", "snapshot": {"root_path": "."}}}, "code_source",
     "move it into snapshot"),
    ({"code_source": {"root_path": "no/such"}}, "code_source.root_path", "is not a folder"),
    (snapshot(root_path=5), "code_source.snapshot.root_path", TEXT),
    (snapshot(include_paths="src"), "code_source.snapshot.include_paths", LIST),
    (snapshot(include_paths=["ok", "../up"]), "code_source.snapshot.include_paths.1", "without .."),
    (snapshot(include_paths=["/abs"]), "code_source.snapshot.include_paths.0", "relative"),
    (snapshot(include_paths=["~/x"]), "code_source.snapshot.include_paths.0", "relative"),
    (snapshot(include_paths=[" "]), "code_source.snapshot.include_paths.0", "relative"),
    (snapshot(git={}), "code_source.snapshot.git.commit", "exactly one of branch and commit"),
    (snapshot(git={"branch": "a", "commit": "b"}), "code_source.snapshot.git.commit", "one of"),
    ({"env_variables": ["A=1"]}, "env_variables", MAPPING),
    ({"env_variables": {"A": 1}}, "env_variables.A", "put quotes around it (found 1)"),
    ({"env_variables": {"A": True}}, "env_variables.A", "put quotes around it (found true)"),
    ({"env_variables": {"A": None}}, "env_variables.A", "must be text (found null)"),
    ({"env_variables": {"A": ["x"]}}, "env_variables.A", "must be text (found ['x'])"),
    ({"env_variables": {1: "x"}}, "env_variables.1", TEXT),
    ({"env_variables": {"A-B": "x"}}, "env_variables.A-B", "is not a variable name"),
    ({"env_variables": {"1A": "x"}}, "env_variables.1A", "is not a variable name"),
    ({"env_variables": {"A\n": "x"}}, "env_variables.A\n", "is not a variable name"),
    ({"env_variables": {"A": "x\0"}}, "env_variables.A", "NUL byte"),
    ({"env_variables": {"A": "x" * 130_000}}, "env_variables.A", "more than 128,000 bytes"),
    ({"secrets": {"A": "only-a-key"}}, "secrets.A", "never the value itself"),
    ({"secrets": {"A": "a/b/c"}}, "secrets.A", "exactly one /"),
    ({"secrets": {"A": "/b"}}, "secrets.A", "exactly one /"),
    ({"secrets": {"A": "a/b\n"}}, "secrets.A", "exactly one /"),
    ({"secrets": {"A": "a/" + "k" * 129}}, "secrets.A", "up to 128"),
    ({"secrets": {"WORLD_SIZE": "a/b"}}, "secrets.WORLD_SIZE", "use another name"),
    ({"parameters": "max_steps: 5"}, "parameters", MAPPING),
    ({"parameters": ["a"]}, "parameters", MAPPING),
    ({"parameters": {"output_dir": 5}}, "parameters.output_dir", "write a folder"),
    ({"parameters": {"output_dir": " "}}, "parameters.output_dir", "write a folder"),
    ({"parameters": {"output_dir": "dbfs:/Volumes/a"}}, "parameters.output_dir", "write a folder"),
    ({"max_retries": -1}, "max_retries", "must be at least 0 (found -1)"),
    ({"max_retries": "2"}, "max_retries", NUMBER),
    ({"max_retries": False}, "max_retries", f"{NUMBER} (found false)"),
    ({"timeout_minutes": 0}, "timeout_minutes", "must be at least 1 (found 0)"),
    ({"timeout_minutes": 1.5}, "timeout_minutes", NUMBER),
    ({"idempotency_token": ""}, "idempotency_token", "must not be empty"),
    ({"idempotency_token": "t" * 65}, "idempotency_token", "at most 64 characters"),
    ({"mlflow_run_name": "a b"}, "mlflow_run_name", "1 to 100 ASCII"),
    ({"mlflow_experiment_directory": "/Users/a"}, "mlflow_experiment_directory", "/Workspace"),
    ({"mlflow_experiment_directory": "/Workspaces"}, "mlflow_experiment_directory", "/Workspace"),
    ({"mlflow_artifact_location": "file:/tmp"}, "mlflow_artifact_location", "every node reaches"),
    ({"mlflow_artifact_location": "/tmp"}, "mlflow_artifact_location", "every node reaches"),
    ({"containers": [{"image": "x"}]}, "containers", "not supported here"),
    ({"permissions": {"level": "x"}}, "permissions", LIST),
    ({"permissions": [None]}, "permissions.0", MAPPING),
    ({"permissions": [{"level": "x"}]}, "permissions.0.service_principal_name", "exactly one of"),
    ({"permissions": [{"user_name": "a", "group_name": "b", "level": "x"}]},
     "permissions.0.service_principal_name", "user_name and group_name given"),
    ({"permissions": [{"user_name": "a"}]}, "permissions.0.level", REQUIRED),
    ({"usage_policy_id": "team"}, "usage_policy_id", "is not a UUID"),
    ({"usage_policy_id": UUID, "usage_policy_name": "t"}, "usage_policy_id", "keep one"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "path", "words"), INVALID, ids=str)
def test_invalid(fields, path, words):
    found = dict(problems(**copy.deepcopy(fields)))
    assert path in found
    assert words in found[path]


@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
def test_the_platform_s_names_are_refused(name):
    assert problems(env_variables={name: "1"}) == [
        (f"env_variables.{name}", "is set by the platform for every node; use another name")
    ]


def test_a_secret_s_value_in_the_wrong_place_is_not_repeated():
    for secrets in ({"A": "hf_secretvalue"}, {"A": 12345678}, "hf_secretvalue", ["hf_secretvalue"]):
        assert "secretvalue" not in str(problems(secrets=secrets))
        assert "12345678" not in str(problems(secrets=secrets))


@pytest.mark.parametrize(
    ("fields", "path", "near"),
    [
        ({"max_retry": 1}, "max_retry", "max_retries"),
        ({"environmnt": {}}, "environmnt", "environment"),
        (compute(num_acelerators=8), "compute.num_acelerators", "num_accelerators"),
        (compute(accelerator_typ="x"), "compute.accelerator_typ", "accelerator_type"),
        ({"environment": {"dependenciess": []}}, "environment.dependenciess", "dependencies"),
        ({"environment": {"docker_image": {"uri": "x"}}}, "environment.docker_image.uri", "url"),
        (snapshot(include_path=[]), "code_source.snapshot.include_path", "include_paths"),
        (snapshot(git={"commt": "x"}), "code_source.snapshot.git.commt", "commit"),
        ({"code_source": {"rootpath": "."}}, "code_source.rootpath", "root_path"),
        ({"code_source": {"snapshots": {}}}, "code_source.snapshots", "snapshot"),
        ({"permissions": [{"username": "a", "level": "x"}]}, "permissions.0.username", "user_name"),
        (ours(learnig_rate=1), "parameters.learnig_rate", "learning_rate"),
        (ours(max_sequence_len=1), "parameters.max_sequence_len", "max_seq_len"),
        (ours(per_device_batchsize=1), "parameters.per_device_batchsize", "per_device_batch_size"),
    ],
    ids=str,
)
def test_a_typo_is_told_with_the_nearest_key(fields, path, near):
    assert dict(problems(**fields))[path] == f"unknown key; did you mean {near}?"


def test_a_key_like_no_other_is_told_with_all_that_are_known():
    (path, message), *_ = problems(zzzzz=1)
    assert path == "zzzzz"
    assert "known here: code_source, command, compute" in message


@pytest.mark.parametrize("key", [5, None, True])
def test_a_key_that_is_no_text(key):
    with pytest.raises(WorkloadError, match="must have a name that is text"):
        Workload.load({**BASE, key: 1})


def test_all_problems_are_told_at_once():
    fields = {
        "experiment_name": "a b",
        "command": OURS,
        "compute": {"num_accelerators": 7, "accelerator_type": "GPU_8xH100", "typo": 1},
        "environment": {"version": "x", "dependencies": "missing.yaml"},
        "code_source": {"type": "tar", "snapshot": {"root_path": "nowhere", "oops": 1}},
        "env_variables": {"RANK": "1", "A-B": "x", "N": 5, "BOTH": "1"},
        "secrets": {"S": "value", "BOTH": "a/b"},
        "parameters": {"learning_rate": "fast", "oops": 1, "per_device_batch_size": 0},
        "containers": [],
        "max_retries": -1,
        "permissions": [{"user_name": "a"}, {"level": "x"}],
    }
    assert {path for path, _ in problems(**fields)} == {
        "experiment_name", "compute.num_accelerators", "compute.typo", "environment.version",
        "environment.dependencies", "code_source.type", "code_source.snapshot.root_path",
        "code_source.snapshot.oops", "env_variables.RANK", "env_variables.A-B", "env_variables.N",
        "secrets.S", "secrets.BOTH", "parameters.learning_rate", "parameters.oops",
        "parameters.per_device_batch_size", "parameters.model_name", "parameters.dataset_name",
        "containers", "max_retries", "permissions.0.level",
        "permissions.1.service_principal_name",
    }  # fmt: skip
    with pytest.raises(WorkloadError) as error:
        load(**fields)
    assert str(error.value).startswith("the given workload is not a valid workload:\n  ")
    assert error.value.exit_code == 2


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(Workload.model_fields)), ODD, st.booleans())
def test_odd_values_are_told_in_plain_words(field, value, with_recipe):
    fields = {**BASE, **(ours() if with_recipe else {}), field: value}
    try:
        Workload.load(fields)
    except WorkloadError as error:
        for path, message in error.problems:
            known = message.partition("(found ")[0]
            assert not re.search(r"pydantic|Input|should|Traceback|\[key\]|NoneType", known)
            assert path.partition(".")[0] in fields


SOME_OF_OURS = [
    *ROWS, "max_seq_len", "per_device_batch_size", "max_steps", "learning_rate", "init",
    "pack_tokens", "eval_dataset",
]  # fmt: skip


@given(st.sampled_from(SOME_OF_OURS), ODD)
def test_odd_parameters_of_ours_are_told_in_plain_words(name, value):
    try:
        load(**ours(**{name: value}))
    except WorkloadError as error:
        for path, message in error.problems:
            assert path.startswith("parameters.")
            assert not JARGON.search(message.partition("(found ")[0])


# Equal workloads


def test_both_dialects_are_one_workload(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = {**BASE, "code_source": {"root_path": ".", "include_paths": ["a"]}}
    new = {**BASE, **snapshot(include_paths=["a"])}
    versions = [
        {**document, "environment": {"version": version, "dependencies": ["trl"]}}
        for document in (old, new)
        for version in (4, "4")
    ]
    (tmp_path / "deps.yaml").write_text("version: 4\ndependencies: [trl]\n")
    versions.append({**new, "environment": {"dependencies": "deps.yaml"}})
    loaded = [Workload.load(version) for version in versions]
    assert len({workload.sha256 for workload in loaded}) == 1
    assert loaded[0] == loaded[1] == loaded[-1]


@pytest.mark.parametrize(
    "fields",
    [
        *VALID,
        ours(max_seq_len=1024, per_device_batch_size=4, learning_rate="2e-5"),
        {"parameters": {"inf": float("inf"), "day": yaml.safe_load("2026-01-01"), 5: "int key",
                        "set": {"x", "y"}, "bytes": b"\xff", "nested": {1: {2.5: None}}}},
    ],
    # A set prints in another order in each of the processes that share the tests.
    ids=lambda fields: "every kind of value" if "set" in str(fields) else str(fields),
)  # fmt: skip
def test_the_effective_workload_is_the_same_workload(fields, tmp_path):
    if any(not isinstance(key, str) for key in fields.get("parameters", {})):
        fields = {"parameters": {k: v for k, v in fields["parameters"].items() if k != 5}}
    first = load(**copy.deepcopy(fields))
    again = Workload.load(first.document())
    assert (again.sha256, again.document()) == (first.sha256, first.document())
    file = tmp_path / "workload.yaml"
    file.write_text(yaml.safe_dump(first.document(), sort_keys=False, allow_unicode=True))
    assert Workload.load(file).sha256 == first.sha256


def test_the_hash_is_the_same_in_every_process(monkeypatch):
    import subprocess
    import sys

    code = (
        "from tunewright.contract.workload import Workload\n"
        f"print(Workload.load({BASE!r} | {{'parameters': {{'s': {{'a', 'b', 'c'}}}}}}).sha256)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


@given(st.dictionaries(st.text(max_size=5), ODD, max_size=4))
def test_the_effective_workload_keeps_any_parameters(parameters):
    parameters.pop("output_dir", None)
    first = load(parameters=parameters)
    assert Workload.load(first.document()).sha256 == first.sha256


def test_a_value_that_differs_is_another_workload():
    hashes = {load(parameters={"x": value}).sha256 for value in (1, "1", 1.5, True, None, [1], {})}
    assert len(hashes) == 7


# Between command and parameters


@pytest.mark.parametrize(
    ("command", "recipe"),
    [
        (OURS, "fsdp"),
        ("torchrun \\\n  --nnodes=2 \\\n  -m tunewright.recipes.fsdp\n", "fsdp"),
        ("bash -c 'torchrun -m tunewright.recipes.fsdp'", "fsdp"),
        ('cd "$CODE_SOURCE_PATH" && python -m "tunewright.recipes.fsdp"; echo done', "fsdp"),
        ("echo 'a # b' && torchrun -m tunewright.recipes.fsdp", "fsdp"),
        ("# torchrun -m tunewright.recipes.fsdp\npython train.py", None),
        ("python train.py  # like tunewright.recipes.fsdp", None),
        ("python my.tunewright.recipes.fsdp", None),
        ("python tunewright.recipes.fsdp.py", None),
        ("python /opt/tunewright.recipes.fsdp", None),
        ("python train.py --like=tunewright.recipes.fsdp", None),
        ("python train.py", None),
    ],
)
def test_a_command_is_ours_when_a_word_of_it_is_a_recipe(command, recipe):
    assert recipe_of(command) == recipe


def test_a_recipe_that_does_not_exist():
    found = problems(command="torchrun -m tunewright.recipes.fsdpp")
    assert found == [("command", "tunewright.recipes.fsdpp is not a recipe; did you mean fsdp?")]


def test_the_users_batch_names_give_the_batch_in_tokens():
    names = {"max_seq_len": 1024, "per_device_batch_size": 4, "gradient_accumulation_steps": 2}
    settings = load(**ours(**names)).settings
    assert settings.global_batch_tokens == 16 * 4 * 2 * 1024
    assert (settings.max_length, settings.pack_tokens) == (1024, 4096)
    same = ours(**{**names, "per_device_train_batch_size": "4"})
    del same["parameters"]["per_device_batch_size"]
    assert load(**same).settings == settings


def test_a_small_batch_of_the_users_is_cut_into_packs_of_its_rows():
    small = {"max_seq_len": 100, "per_device_batch_size": 3}
    settings = load(**ours(**small), **compute(num_accelerators=8)).settings
    assert (settings.global_batch_tokens, settings.pack_tokens) == (8 * 3 * 100, 100)
    long = {"max_seq_len": 8192, "per_device_batch_size": 1}
    assert load(**ours(**long)).settings.pack_tokens == 8192


@pytest.mark.parametrize(
    ("parameters", "path", "words"),
    [
        ({"per_device_batch_size": 1, "global_batch_tokens": 4096},
         "parameters.per_device_batch_size", "keep one way to say the batch"),
        ({"gradient_accumulation_steps": 1, "global_batch_tokens": 4096},
         "parameters.gradient_accumulation_steps", "keep one way to say the batch"),
        ({"per_device_batch_size": 1, "per_device_train_batch_size": 1},
         "parameters.per_device_batch_size", "they mean the same, keep one"),
        ({"max_seq_len": 16, "max_length": 16}, "parameters.max_seq_len", "keep one"),
        ({"max_seq_len": 4}, "parameters.max_seq_len", "must be at least 8 (found 4)"),
        ({"per_device_batch_size": 1.5}, "parameters.per_device_batch_size", "whole number"),
        ({"per_device_batch_size": float("inf")}, "parameters.per_device_batch_size", "whole"),
        ({"gradient_accumulation_steps": True}, "parameters.gradient_accumulation_steps", "whole"),
        ({"per_device_batch_size": 1, "max_seq_len": 100, "pack_tokens": 1000},
         "parameters.per_device_batch_size", "not a whole number of packs"),
        ({"global_batch_tokens": 5000}, "parameters.global_batch_tokens", "nearest: 4096"),
        ({"tokens_per_device": 5000}, "parameters.tokens_per_device", "nearest: 4096"),
        ({"max_length": 5000}, "parameters.pack_tokens", "raise pack_tokens or lower max_length"),
        ({"eval_fraction": 0.1, "eval_dataset": "x"}, "parameters.eval_dataset", "remove one"),
        ({"learning_rate": "fast"}, "parameters.learning_rate", "must be a number (found 'fast')"),
        ({"learning_rate": 0}, "parameters.learning_rate", "must be more than 0 (found 0)"),
        ({"learning_rate": True}, "parameters.learning_rate", "must be a number (found true)"),
        ({"learning_rate": float("nan")}, "parameters.learning_rate", "finite number"),
        ({"eval_fraction": 1}, "parameters.eval_fraction", "must be less than 1 (found 1)"),
        ({"warmup_ratio": 1.5}, "parameters.warmup_ratio", "must be at most 1"),
        ({"max_steps": "ten"}, "parameters.max_steps", NUMBER),
        ({"max_steps": True}, "parameters.max_steps", "must be a number (found true)"),
        ({"init": "radom"}, "parameters.init", "must be pretrained or random (found 'radom')"),
        ({"model_name": ""}, "parameters.model_name", "must not be empty"),
        ({"model_name": None}, "parameters.model_name", REQUIRED),
        ({"model_name": 5}, "parameters.model_name", TEXT),
    ],
    ids=str,
)  # fmt: skip
def test_parameters_of_a_recipe(parameters, path, words):
    found = dict(problems(**ours(**parameters)))
    assert list(found) == [path] or (path in found and len(parameters) > 1)
    assert words in found[path]


def test_text_that_is_a_number_counts_as_one():
    settings = load(**ours(learning_rate="2e-5", max_steps="50", eval_steps=None)).settings
    assert (settings.learning_rate, settings.max_steps, settings.eval_steps) == (2e-5, 50, 200)
    assert yaml.safe_load("2e-5") == "2e-5", "what makes this necessary"


def test_a_user_s_own_parameters_are_free():
    assert load(parameters={"learnig_rate": "x", "max_steps": True}).settings is None


# Paths


def test_paths_of_a_recipe_are_relative_to_the_file(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "a", tmp_path / "b"
    for path in (folder / "code", elsewhere):
        path.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    parameters = {"model_name": "./model", "dataset_name": "../rows.jsonl",
                  "eval_dataset": "~/rows", "output_dir": "runs"}  # fmt: skip
    document = {**BASE, "command": OURS, "code_source": {"root_path": "code"}}
    file = folder / "w.yaml"
    file.write_text(yaml.safe_dump({**document, "parameters": parameters}))
    found = Workload.load(file)
    assert found.parameters == {
        "model_name": f"{folder}/model",
        "dataset_name": f"{tmp_path}/rows.jsonl",
        "eval_dataset": f"{tmp_path}/me/rows",
        "output_dir": f"{folder}/runs",
    }
    assert found.code_source.root_path == f"{folder}/code"


def test_paths_given_by_set_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "file").mkdir()
    (tmp_path / "here" / "code").mkdir(parents=True)
    (tmp_path / "here" / "deps.yaml").write_text("dependencies: [trl]")
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "file" / "w.yaml"
    file.write_text(yaml.safe_dump({**BASE, **ours()}))
    given = {
        "parameters.model_name": "./m",
        "parameters.dataset_name": "org/rows",
        "code_source.root_path": "code",
        "environment.dependencies": "deps.yaml",
        "parameters.output_dir": "./runs",
    }
    found = Workload.load(file, given)
    assert found.parameters["model_name"] == f"{tmp_path}/here/m"
    assert found.parameters["dataset_name"] == "org/rows"
    assert found.parameters["output_dir"] == f"{tmp_path}/here/runs"
    assert found.code_source.root_path == f"{tmp_path}/here/code"
    assert found.environment.dependencies == ["trl"]
    whole = Workload.load(file, {"parameters": "{model_name: ./m, dataset_name: ./d}"})
    assert whole.parameters["dataset_name"] == f"{tmp_path}/here/d"


def test_the_names_of_several_datasets_are_paths_too(tmp_path, monkeypatch):
    (tmp_path / "file").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    sources = [{"name": "./a.jsonl:train[:5]"}, {"name": "org/rows:test", "weight": 2}]
    given_ = {"model_name": "a/b", "datasets": sources, "chat_template": "./chat.jinja"}
    file = tmp_path / "file" / "w.yaml"
    file.write_text(yaml.safe_dump({**BASE, "command": OURS, "parameters": given_}))
    found = Workload.load(file).parameters
    assert [source["name"] for source in found["datasets"]] == [
        f"{tmp_path}/file/a.jsonl:train[:5]",
        "org/rows:test",
    ]
    assert found["chat_template"] == f"{tmp_path}/file/chat.jinja"
    one = Workload.load(file, {"parameters.datasets.0.name": "./b"}).parameters["datasets"]
    assert one[0]["name"] == f"{tmp_path}/here/b"
    every = Workload.load(file, {"parameters.datasets": "[{name: ./c}]"}).parameters["datasets"]
    assert every == [{"name": f"{tmp_path}/here/c"}]
    text = Workload.load(file, {"parameters.chat_template": "{{ x }}"}).parameters
    assert text["chat_template"] == "{{ x }}"
    assert given_["datasets"][0]["name"] == "./a.jsonl:train[:5]"


def test_problems_of_several_datasets_have_their_paths():
    sources = [{"name": "a/b", "weight": 0}, {"weight": 1, "oops": "text"}]
    several = {"command": OURS, "parameters": {"model_name": "a/b", "datasets": sources}}
    assert {path for path, _ in problems(**several)} == {
        "parameters.datasets.0.weight",
        "parameters.datasets.1.name",
        "parameters.datasets.1.oops",
    }
    (both,) = problems(**ours(datasets=[{"name": "a/b"}]))
    assert both == ("parameters.dataset_name", "dataset_name and datasets are both set; keep one")
    (none,) = problems(command=OURS, parameters={"model_name": "a/b"})
    assert none[0] == "parameters.dataset_name"


def test_a_user_s_own_paths_are_left_alone(tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text(yaml.safe_dump({**BASE, "parameters": {"model_name": "./m"}}))
    assert Workload.load(file).parameters == {"model_name": "./m"}
    set_ = {"parameters.model_name": "./other"}
    assert Workload.load(file, set_).parameters == {"model_name": "./other"}


def test_artifacts_on_a_volume_become_dbfs():
    found = load(mlflow_artifact_location="/Volumes/c/s/v/x")
    assert found.mlflow_artifact_location == "dbfs:/Volumes/c/s/v/x"


def test_the_file_with_dependencies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("deps.yaml").write_text("version: AI5\ndependencies: [trl>=1.1]\n")
    found = load(environment={"dependencies": "deps.yaml"}).environment
    assert (found.version, found.dependencies) == ("AI5", ["trl>=1.1"])
    Path("deps.yaml").write_text("packages: [a]\n")
    assert "holds packages" in problems(environment={"dependencies": "deps.yaml"})[0][1]
    Path("deps.yaml").write_text("dependencies: 5\n")
    assert problems(environment={"dependencies": "deps.yaml"})[0][0] == "environment.dependencies"


# What may surprise


def test_an_unknown_accelerator_is_taken_with_a_warning():
    found = load(compute={"num_accelerators": 8, "accelerator_type": "GPU_4xB200"}, max_retries=0)
    assert (found.nodes, found.compute.gpus_per_node) == (2, 4)
    assert found.warnings() == ["accelerator type GPU_4xB200 is not one we know; taking 4 per node"]


def test_the_platform_s_retries_are_said_when_the_file_says_nothing():
    assert "default of 3" in load().warnings()[0]
    assert (load().attempts, load(max_retries=3).warnings()) == (4, [])


def test_errors_travel_between_processes():
    import pickle

    with pytest.raises(WorkloadError) as error:
        load(max_retries=-1)
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.problems) == (str(error.value), error.value.problems)


def test_a_file_that_cannot_be_read_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Workload.load(tmp_path / "none.yaml")
