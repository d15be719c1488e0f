"""The house rules: import walls, light imports, deployments that load, names, sizes, linters."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint

from tunewright.contract.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
ROOMS = ("flows", "tasks", "tunewright")
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
DEPLOYMENTS = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
WORKLOADS = sorted(set((ROOT / "deployments").glob("*.yaml")) - {ROOT / "deployments/prefect.yaml"})
HEAVY = {"torch", "transformers", "mlflow", "ray", "databricks"}
TOOLS = {
    "import walls": ["lint-imports"],
    "lint": ["ruff", "check"],
    "format": ["ruff", "format", "--check"],
    "types": ["mypy"],
    "spelling": ["codespell"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tool_has_nothing_to_say(tool: str) -> None:
    name, *words = TOOLS[tool]
    found = subprocess.run([BIN / name, *words], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def imported_by(*words: str) -> set[str]:
    """The top-level packages that a fresh interpreter has in it after running these words."""
    code = (
        "import sys, runpy\n"
        f"sys.argv = {list(words)!r}\n"
        "try: runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=False)\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('\\nLOADED', *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return set(found.stdout.rpartition("LOADED")[2].split())


def test_the_flow_is_light() -> None:
    loaded = imported_by("flows.sft")
    assert "prefect" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["run", "--help"],
        ["check", "deployments/tiny.yaml"],
        ["check", "--help"],
        ["import", "tests/data/imports/axolotl_full.yml"],
    ],
    ids=" ".join,
)
def test_the_command_line_is_lighter(words: list[str]) -> None:
    loaded = imported_by("flows", *words)
    assert "click" in loaded
    assert not loaded & {*HEAVY, "prefect"}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_every_deployment_loads(
    deployment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prefect deploy` registers even a flow that cannot be imported."""
    monkeypatch.chdir(ROOT)
    flow = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    if asyncio.iscoroutine(flow):
        flow = asyncio.run(flow)
    assert flow.name == "sft"
    flow.validate_parameters(deployment["parameters"])
    workload = Workload.load(deployment["parameters"]["workload"])
    assert workload.experiment_name == deployment["name"]


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_every_workload_file_is_valid_and_used(path: Path) -> None:
    assert Workload.load(path).experiment_name == path.stem
    deployed = {deployment["parameters"]["workload"] for deployment in DEPLOYMENTS}
    name = f"deployments/{path.name}"
    assert name in deployed or name in (ROOT / "Makefile").read_text()


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    assert [str(p) for p in MODULES if p.stem in sys.stdlib_module_names - {"__main__"}] == []


def test_no_flow_is_named_like_a_package() -> None:
    """Prefect puts flows/ first in sys.path: a flows/tasks.py would stand before tasks."""
    packages = {*metadata.packages_distributions(), *ROOMS}
    assert [p.name for p in (ROOT / "flows").iterdir() if p.stem in packages] == []


def test_modules_and_functions_stay_readable() -> None:
    assert [name for name, lines in module_sizes() if lines > 400] == []
    assert [name for name, lines in function_sizes() if lines > 60] == []


def module_sizes() -> Iterator[tuple[str, int]]:
    for path in MODULES:
        yield str(path.relative_to(ROOT)), len(path.read_text().splitlines())


def function_sizes() -> Iterator[tuple[str, int]]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{path.name}:{node.name}", node.end_lineno - node.lineno + 1
