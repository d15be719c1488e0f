"""Declared dependencies against this interpreter's packages."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from tasks import requirements
from tunewright.contract.failures import UserError
from tunewright.contract.workload import Workload

PYTEST = metadata.version("pytest")


def check(*lines: str, document=None, **environment) -> list[str]:
    fields = {"dependencies": list(lines), **environment} if lines else environment
    compute = {"num_accelerators": 1, "accelerator_type": "GPU_1xH100"}
    found = {"experiment_name": "x", "command": "true", "compute": compute, "environment": fields}
    return requirements.check(Workload.load(found))


@pytest.mark.parametrize(
    "line",
    [
        "pytest", "pytest>=8", f"pytest=={PYTEST}", "PyTest", "pytest>=8,<10000", "pytest >= 8",
        "pytest>=8  # what runs this", "pytest[testing]>=8",
        "pytest @ https://example.org/pytest.whl",
        'no-such-package-x; python_version < "3"', f'pytest; sys_platform == "{sys.platform}"',
        "", "# only a comment",
    ],
)  # fmt: skip
def test_met(line):
    assert check(line) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no-such-package-x>=1", "not installed"),
        ("pytest<2", f"{PYTEST} is installed"),
        ("pytest==2.*", f"{PYTEST} is installed"),
        ('pytest<2; python_version > "3"', f"{PYTEST} is installed"),
    ],
)
def test_unmet_is_told_with_the_pip_line(line, reason):
    with pytest.raises(UserError) as error:
        check("pytest", line, "no-such-package-y")
    assert f"{line} ({reason})" in str(error.value)
    assert str(error.value).endswith(f"; pip install '{line}' no-such-package-y")
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "line", ["-r more.txt", "--index-url https://example.org", "./a.whl", "git+https://x/y"]
)
def test_what_is_no_requirement_is_noted(line):
    (note,) = check(line, "pytest")
    assert line in note
    assert "not checked here" in note


def test_an_image_and_no_environment():
    (note,) = check(docker_image={"url": "image"})
    assert "image" in note
    assert check() == []
