"""The documents name only what exists: links, commands, paths, messages, generated blocks."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import yaml

from flows.__main__ import cli
from tunewright.contract.settings import RECIPES

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
README = ROOT / "README.md"
STEPS = ("resolve_secret", "pretokenize", "launch", "consolidate", "register")
ROOMS = "benchmarks deployments docker flows tasks tests tunewright".split()  # noqa: SIM905
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|yaml|md|toml|jsonl|txt|Dockerfile)")


def pages() -> list[Path]:
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(ROOT / p for p in found if not any(part.startswith(".") for part in p.parts))


each_page = pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def shell_lines(text: str) -> Iterator[list[str]]:
    """The words of every command in a shell block, comments and variables before it left out."""
    for line in re.split(r"\n(?!\s)", text.replace("\\\n", " ").strip()):
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command that a page names, in its blocks and its sentences."""
    for text in blocks(page, "sh"):
        yield from shell_lines(text)
    for text in blocks(page, "console"):
        yield from shell_lines("\n".join(li for li in text.splitlines() if li.startswith("$ ")))
    prose = FENCE.sub("", page.read_text())
    for span in re.findall(r"`([^`\n]+)`", prose):
        if re.match(r"(make|prefect|tunewright|python|torchrun|docker) ", span):
            yield from shell_lines(span)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_commands_exist(page: Path) -> None:
    for words in commands(page):
        check = CHECKS.get(Path(words[0]).name)
        assert check is not None, f"{page.name}: no check for {' '.join(words)}"
        check(words)


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(words[1:]) <= set(targets), words


def check_python(words: list[str]) -> None:
    if words[1] == "-m":
        assert find_spec(words[2]), words
    else:
        assert (ROOT / words[1]).is_file(), words
    check_paths(words)


def check_torchrun(words: list[str]) -> None:
    check_python(["python", *words[words.index("-m") :]])


def check_tunewright(words: list[str]) -> None:
    """Parsed by the command line itself, which refuses what it does not know."""
    command = cli.commands[words[1]]
    with click.Context(cli) as parent:
        arguments = words[2:]
        if arguments or command.params == []:
            command.make_context(words[1], list(arguments), parent=parent)
    check_paths(words)


def check_prefect(words: list[str]) -> None:
    names = [word for word in words[1:4] if re.fullmatch(r"[a-z-]+", word)]
    options = {word for word in words if word.startswith("-")}
    help_text = prefect_help(*names[: 1 if names[0] == "deploy" else 2])
    assert options <= set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_text)), words
    if words[1:3] == ["deployment", "run"]:
        assert words[3].removeprefix("sft/") in deployments(), words
    if words[1:3] in (["work-pool", "create"], ["worker", "start"]):
        assert "tunewright" in words, words
    check_paths(words)


@cache
def prefect_help(*names: str) -> str:
    words = [str(BIN / "prefect"), *names, "--help"]
    found = subprocess.run(words, capture_output=True, text=True)
    assert found.returncode == 0, words
    # A command that is not there shows the help of its group.
    assert f"Usage: prefect {' '.join(names)} " in found.stdout, names
    return found.stdout


def check_docker(words: list[str]) -> None:
    check_paths([word.partition(":")[0] for word in words])
    if words[1] == "build":
        named = [word.partition("=")[0] for word in words if re.fullmatch(r"[A-Z_]+=.*", word)]
        assert all(f"ARG {name}" in (ROOT / words[3]).read_text() for name in named)


def check_source(words: list[str]) -> None:
    assert words[1:] == [".venv/bin/activate"], words


def check_paths(words: list[str]) -> None:
    """Every word that starts in one of the rooms is a file or folder there."""
    for word in words:
        path = word.rpartition("=")[2].removeprefix("./")
        if path.partition("/")[0] in ROOMS and "/" in path:
            assert (ROOT / path).exists(), words


CHECKS = {
    "make": check_make,
    "python": check_python,
    "torchrun": check_torchrun,
    "tunewright": check_tunewright,
    "prefect": check_prefect,
    "docker": check_docker,
    "source": check_source,
}


@each_page
def test_paths_in_sentences_exist(page: Path) -> None:
    for span in re.findall(r"`([^`\s]+)`", FENCE.sub("", page.read_text())):
        in_a_room = span.partition("/")[0] in ROOMS and "/" in span and "<" not in span
        if in_a_room or (FILE.fullmatch(span) and span not in OF_A_RUN):
            assert any((base / span).exists() for base in (ROOT, page.parent)), span


OF_A_RUN = {
    "data-audit.md",
    "manifest.json",
    "receipt.json",
    "workload.yaml",
    "hyperparameters.yaml",
}


def test_the_tree_is_that_of_the_repository() -> None:
    (tree,) = (text for text in blocks(README, "text") if text.startswith("flows/"))
    place: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        place = [*place[:depth], line.split()[0]]
        assert ROOT.joinpath(*place).exists(), line
    for name in ("flows", *(f"tasks/{step}.py" for step in STEPS)):
        assert name.rpartition("/")[2] in tree


def test_generated_blocks_are_fresh() -> None:
    generator = runpy.run_path(str(ROOT / "deployments" / "make_docs.py"))
    for page in generator["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert generator["BLOCK"].search(text), page
        assert generator["filled"](text) == text, "run: python deployments/make_docs.py"


@pytest.mark.parametrize("shown", blocks(README, "console"), ids=lambda shown: shown.split()[2])
def test_messages_are_what_is_printed(shown: str, tmp_path: Path) -> None:
    first, _, expected = shown.partition("\n")
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TUNEWRIGHT_HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = [sys.executable, "-m", "flows", *shlex.split(first)[2:]]
    found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.stderr == expected
    assert found.stdout == ""
    assert found.returncode == 2


def test_every_step_and_recipe_is_explained() -> None:
    text = README.read_text()
    assert [step for step in STEPS if step not in text] == []
    for page in (README, ROOT / "deployments" / "README.md", ROOT / "tunewright/recipes/README.md"):
        assert [name for name in RECIPES if name not in page.read_text()] == []


def deployments() -> set[str]:
    found = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
    return {deployment["name"] for deployment in found["deployments"]}


def test_every_deployment_and_file_of_it_is_mentioned() -> None:
    text = (ROOT / "deployments" / "README.md").read_text()
    assert [name for name in deployments() if f"`sft/{name}`" not in text] == []
    files = [path.name for path in (ROOT / "deployments").glob("*.yaml")]
    assert [name for name in files if name not in text] == []


def test_the_readme_stays_short() -> None:
    assert len(README.read_text().splitlines()) <= 250
