"""The images: linted, pinned, without root or secrets, and made of files that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY")

each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


def instructions(path: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) in order, continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), rest) for word, rest in found]


def test_hadolint_has_nothing_to_say() -> None:
    assert [path.stem for path in DOCKERFILES] == ["pipeline", "trainer"]
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([hadolint, *DOCKERFILES], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


@each_dockerfile
def test_base_images_are_arguments_with_a_pinned_default(path: Path) -> None:
    defaults = dict(rest.split("=", 1) for word, rest in instructions(path) if word == "ARG")
    for word, rest in instructions(path):
        if word == "FROM":
            name = re.match(r"\$\{(\w+)\}", rest)
            assert name, rest
            assert re.fullmatch(r"[\w./-]+:\d[\w.-]+", defaults[name[1]])


@each_dockerfile
def test_runs_as_an_ordinary_user(path: Path) -> None:
    users = [rest for word, rest in instructions(path) if word == "USER"]
    assert users
    assert int(users[-1]) > 0


@each_dockerfile
def test_copies_only_what_exists(path: Path) -> None:
    for word, rest in instructions(path):
        assert word != "ADD"
        if word == "COPY" and not rest.startswith("--from"):
            sources = rest.split()[:-1]
            assert sources != ["."], "the whole context may hold credentials"
            assert [name for name in sources if not (ROOT / name).exists()] == []


@each_dockerfile
def test_the_command_is_in_exec_form(path: Path) -> None:
    commands = [rest for word, rest in instructions(path) if word in ("CMD", "ENTRYPOINT")]
    assert commands
    assert all(isinstance(json.loads(command), list) for command in commands)


@each_dockerfile
def test_no_secret_is_built_in(path: Path) -> None:
    named = [rest for word, rest in instructions(path) if word in ("ARG", "ENV")]
    assert not SECRET.search("\n".join(named))


def test_every_image_of_compose_is_pinned_or_built_here() -> None:
    built = {s["image"] for s in COMPOSE["services"].values() if "build" in s}
    for service in COMPOSE["services"].values():
        assert service["image"] in built or re.search(r":v?\d[\w.-]+\Z", service["image"])
    for service in COMPOSE["services"].values():
        if "build" in service:
            context = ROOT / "docker" / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()


def test_compose_hands_secrets_on_and_holds_none() -> None:
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            assert value is None or not SECRET.search(name)


def test_compose_is_reachable_from_this_machine_alone() -> None:
    ports = [port for s in COMPOSE["services"].values() for port in s.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_what_compose_refers_to_is_there() -> None:
    for service in COMPOSE["services"].values():
        assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])
        assert {mount.split(":")[0] for mount in service.get("volumes", [])} <= set(
            COMPOSE["volumes"]
        )
