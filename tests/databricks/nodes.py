"""The nodes of one attempt: real processes with the environment that the platform promises."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.databricks.state import Rules
from tunewright.contract.processes import end_marked

MARK = "DATABRICKS_STANDIN_NODE"

# A root of its own in which the platform's folders are mounted where a command expects them.
_ENTER = """
set -e
root=$1 volumes=$2 workspace=$3 databricks=$4 disk=$5; shift 5
mount -t tmpfs none "$root"
for place in /*; do
  case $place in /Volumes|/Workspace|/databricks|/local_disk0) continue;; esac
  if [ -L "$place" ]; then cp -P "$place" "$root$place"
  elif [ -d "$place" ]; then mkdir "$root$place"; mount --rbind "$place" "$root$place"; fi
done
mkdir "$root/Volumes" "$root/Workspace" "$root/databricks" "$root/local_disk0"
mount --bind "$volumes" "$root/Volumes"
mount --bind "$workspace" "$root/Workspace"
mount --bind "$databricks" "$root/databricks"
mount --bind "$disk" "$root/local_disk0"
exec chroot "$root" "$@"
"""
_ENTER_COMMAND = ("unshare", "-rm", "bash", "-c", _ENTER, "enter")

# What the volume's mount refuses, as far as Python's own calls show it.
GUARD = '''"""Refuses what a volume's mount refuses: append, writes in a file, rename, links."""
import errno, os, sys

_ROOTS = tuple(os.environ["DATABRICKS_STANDIN_VOLUMES"].split(os.pathsep))

def _refuse(event, args):
    if event == "open":
        path, _, flags = args
        bad = flags is not None and (flags & os.O_APPEND or flags & os.O_ACCMODE == os.O_RDWR
                                     and not flags & os.O_TRUNC and not flags & os.O_CREAT)
        paths = [path] if bad else []
    elif event in ("os.rename", "os.link", "os.symlink", "os.truncate"):
        # Where a link leads to does not matter, only where it is made.
        paths = args[1:2] if event == "os.symlink" else args[:2]
    else:
        return
    for path in paths:
        try:
            name = os.path.abspath(os.fsdecode(path))
        except TypeError:
            continue
        if name.startswith(_ROOTS):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)

sys.addaudithook(_refuse)
'''


def mounted(places: Places, folder: Path) -> list[str]:
    """What goes before a command that has the platform's mounts; `folder` is for its others."""
    own = [folder / name for name in ("root", "databricks", "disk")]
    for place in own:
        place.mkdir(parents=True, exist_ok=True)
    root, databricks, disk = own
    mounts = [root, places.volumes, places.workspace, databricks, disk]
    return [*_ENTER_COMMAND, *map(str, mounts)]


class LaunchError(Exception):
    """The platform cannot start the command: `code` is the termination code."""

    def __init__(self, message: str, code: str = "INVALID_RUN_CONFIGURATION") -> None:
        super().__init__(message)
        self.code = code


@functools.cache
def can_mount() -> bool:
    """Whether a process may have mounts of its own here."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, part) for part in ("root", "volumes", "workspace", "code", "disk")]
        for folder in folders:
            folder.mkdir()
        asked = [*_ENTER_COMMAND, *map(str, folders), "true"]
        try:
            return subprocess.run(asked, capture_output=True).returncode == 0
        except FileNotFoundError:
            return False


@dataclass
class Places:
    """Real folders behind the platform's paths."""

    volumes: Path
    workspace: Path
    mounts: bool = field(default_factory=can_mount)

    def real(self, name: str) -> Path:
        """The real path of one below /Volumes or /Workspace."""
        for prefix, folder in (("/Volumes/", self.volumes), ("/Workspace/", self.workspace)):
            if name.startswith(prefix):
                return folder / name.removeprefix(prefix)
        return self.workspace / name.lstrip("/")

    def rewritten(self, text: str) -> str:
        """A text for a node without mounts: real paths in place of the platform's."""
        if self.mounts:
            return text
        text = re.sub(r"(?<![\w./])/Volumes/", f"{self.volumes}/", text)
        return re.sub(r"(?<![\w./])/Workspace/", f"{self.workspace}/", text)


@dataclass
class Launch:
    """What the launcher finds in an attempt's request: read once, used by every node."""

    places: Places
    command: str
    nodes: int
    procs_per_node: int
    environment: dict[str, str]
    hyperparameters: str | None
    code: Path | None
    wheels: list[Path]


def read_launch(
    task: dict[str, Any], dependencies: list[str], places: Places,
    rules: Rules, secrets: dict[str, dict[str, str]],
) -> Launch:  # fmt: skip
    """The launch folder by its contract names; raises LaunchError."""
    ai = task["ai_runtime_task"]
    deployment = ai["deployments"][0]
    compute = deployment["compute"]
    per_node = int(re.match(r"GPU_(\d+)x", compute["accelerator_type"])[1])  # type: ignore[index]
    path = places.real(deployment.get("command_path") or "")
    if not path.is_file():
        raise LaunchError(f"command_path {deployment.get('command_path')} does not exist")
    folder = path.parent
    requirements = yaml.safe_load(_text(folder / "requirements.yaml") or "{}") or {}
    environment = {
        entry["name"]: places.rewritten(entry["value"]) for entry in _json(folder / "env_vars.json")
    }
    for entry in _json(folder / "secret_env_vars.json"):
        scope, key = entry["secret_scope"], entry["secret_key"]
        if key not in secrets.get(scope, {}):
            raise LaunchError(f"Secret {scope}/{key} does not exist", "RESOURCE_NOT_FOUND")
        environment[entry["name"]] = secrets[scope][key]
    hyperparameters = _text(folder / "hyperparameters.yaml")
    source = ai.get("code_source_path")
    return Launch(
        places=places,
        command=places.rewritten(path.read_text()),
        nodes=compute["accelerator_count"] // per_node,
        procs_per_node=rules.procs_per_node or per_node,
        environment=environment,
        hyperparameters=None if hyperparameters is None else places.rewritten(hyperparameters),
        code=_existing_tarball(places, source) if source else None,
        wheels=_wheels([*dependencies, *requirements.get("dependencies", [])], places),
    )


def _text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _json(path: Path) -> list[dict[str, str]]:
    return list(json.loads(_text(path) or "[]"))


def _existing_tarball(places: Places, source: str) -> Path:
    path = places.real(source)
    if not path.is_file():
        raise LaunchError(f"code_source_path {source} does not exist", "RESOURCE_NOT_FOUND")
    return path


def _wheels(dependencies: list[str], places: Places) -> list[Path]:
    """The wheels that are named by path; everything else is taken for installed."""
    found = [places.real(name) for name in dependencies if name.endswith(".whl")]
    for path in found:
        if not path.is_file():
            message = f"Library installation failed: {path.name} was not found"
            raise LaunchError(message, "LIBRARY_INSTALLATION_ERROR")
    return found


@dataclass
class Line:
    """One line of a node's output."""

    at_ns: int
    text: str


class Node:
    """One command: its folders, its process, its output."""

    def __init__(self, folder: Path, rank: int, mark: str) -> None:
        self.folder, self.rank, self.mark = folder, rank, mark
        self.log = folder / "output.log"
        self.lines: list[Line] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._pump: threading.Thread | None = None

    def start(self, launch: Launch, environment: dict[str, str], python: Path) -> None:
        """Lay out the node's disk and start the command on it."""
        names = ("work", "home", "tmp", "disk", "site", "databricks/code_source", "root")
        for name in names:
            (self.folder / name).mkdir(parents=True)
        script = self.folder / "command.sh"
        script.write_text(launch.command)
        for wheel in launch.wheels:
            zipfile.ZipFile(wheel).extractall(self.folder / "site")
        (self.folder / "site" / "sitecustomize.py").write_text(GUARD)
        env = {**self._environment(launch, python), **environment, **launch.environment}
        env["PYTHONPATH"] = os.pathsep.join(
            [str(self.folder / "site"), *filter(None, [env.get("PYTHONPATH")])]
        )
        back = ["env", "-C", str(self.folder / "work")]
        entry = [*mounted(launch.places, self.folder), *back] if launch.places.mounts else []
        self.process = subprocess.Popen(
            [*entry, "bash", "-euo", "pipefail", str(script)],
            cwd=self.folder / "work", env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._pump = threading.Thread(target=self._follow, daemon=True)
        self._pump.start()

    def _environment(self, launch: Launch, python: Path) -> dict[str, str]:
        places = launch.places
        env = {
            "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "NUM_NODES": str(launch.nodes),
            "NODE_RANK": str(self.rank),
            "POD_RANK": str(self.rank),
            "LOCAL_WORLD_SIZE": str(launch.procs_per_node),
            "WORLD_SIZE": str(launch.nodes * launch.procs_per_node),
            "LOCAL_ADDR": "127.0.0.1",
            "MASTER_ADDR": "127.0.0.1",
            "NCCL_DEBUG": "INFO",
            "NCCL_IB_TIMEOUT": "22",
            "NCCL_CUMEM_ENABLE": "0",
            "MLFLOW_SYSTEM_METRICS_NODE_ID": f"node_{self.rank}",
            "DATABRICKS_STANDIN_VOLUMES": f"/Volumes/{os.pathsep}{places.volumes}/",
            MARK: self.mark,
        }
        if not places.mounts:
            env["TUNEWRIGHT_WHOLE_FILES"] = str(places.volumes)
        if launch.hyperparameters is not None:
            path = self.folder / "hyperparameters.yaml"
            path.write_text(launch.hyperparameters)
            env["HYPERPARAMETERS_PATH"] = str(path)
        if launch.code is not None:
            env["CODE_SOURCE_PATH"] = self._unpack(launch.code, places.mounts)
        return env

    def _unpack(self, tarball: Path, mounts: bool) -> str:
        code = self.folder / "databricks" / "code_source"
        with tarfile.open(tarball) as archive:
            tops = {name.split("/")[0] for name in archive.getnames()} - {"", "."}
            if len(tops) != 1:
                raise LaunchError("could not determine top level component from tarball")
            archive.extractall(code, filter="tar")
        (top,) = tops
        return f"/databricks/code_source/{top}" if mounts else str(code / top)

    def _follow(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        with self.log.open("wb") as log, self.process.stdout as output:
            for line in output:
                log.write(line)
                log.flush()
                self.lines.append(
                    Line(time.time_ns(), line.decode("utf-8", "replace").rstrip("\n"))
                )

    @property
    def exit_code(self) -> int | None:
        return self.process.poll() if self.process else None

    def signal(self, number: signal.Signals) -> None:
        """To the command and everything below it."""
        if self.process is None:
            return
        with suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            for process in [top, *top.children(recursive=True)]:
                with suppress(psutil.Error):
                    process.send_signal(number)

    def finish(self) -> None:
        """Nothing of the node is left afterwards, and its output is complete."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        end_marked(MARK, self.mark)
        self.process.wait()
        if self._pump is not None:
            self._pump.join(5)


def end_all(nodes: list[Node], grace_s: float, *, abruptly: bool = False) -> None:
    """SIGTERM to every node, `grace_s` seconds, then SIGKILL: none is left."""
    for node in nodes:
        node.signal(signal.SIGKILL if abruptly else signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(_alive(node) for node in nodes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for node in nodes:
        node.finish()


def _alive(node: Node) -> bool:
    return node.process is not None and node.exit_code is None


def this_python() -> Path:
    return Path(sys.executable)
