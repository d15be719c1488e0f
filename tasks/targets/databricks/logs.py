"""What every node of an attempt prints, from wherever the platform offers it.

First choice is the live log of the run, which not every workspace has; then the files that the
platform leaves among the artifacts of its MLflow run. Known secrets are masked before a byte is
shown or stored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.targets.databricks.api import Denied, Missing, Refused, Workspace, WorkspaceAway
from tasks.targets.databricks.tracking import PlatformRun
from tunewright.contract.failures import TunewrightError
from tunewright.contract.scrub import Scrubber

_LIVE = "/api/2.0/ai-training/workflows/by-run-id/{run}/logs"
_OVERLAP_S = 30
_PAGE = 1000
_FAILURES = 5
_ARTIFACTS_EVERY_S = 15.0
_NODE = re.compile(r"logs/(?:attempt_(\d+)/)?node_(\d+)(?:/logs-(\d+)\.chunk\.txt|[^/]*)\Z")

Say = Callable[[int, str], None]


class NodeLog:
    """One node's output: masked, into a file, and on by whole lines."""

    def __init__(self, node: int, place: Path, secrets: Mapping[str, str], say: Say) -> None:
        self._node, self._say, self.place = node, say, place
        self._scrubber = Scrubber(secrets)
        self._rest = b""
        # What an earlier follower wrote comes again, from the beginning.
        place.unlink(missing_ok=True)

    def add(self, chunk: bytes) -> None:
        self._write(self._scrubber.feed(chunk))

    def end(self) -> None:
        self._write(self._scrubber.finish())
        if self._rest:
            self._say(self._node, self._rest.decode("utf-8", "replace"))
            self._rest = b""

    def _write(self, shown: bytes) -> None:
        if not shown:
            return
        self.place.parent.mkdir(parents=True, exist_ok=True)
        with self.place.open("ab") as file:
            file.write(shown)
        *whole, self._rest = (self._rest + shown).split(b"\n")
        for line in whole:
            self._say(
                self._node, line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
            )


class Logs:
    """The logs of one job run, asked for new lines now and then."""

    def __init__(
        self,
        workspace: Workspace,
        job_run: int,
        nodes: Mapping[int, NodeLog],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._workspace, self._job_run, self._nodes, self._clock = workspace, job_run, nodes, clock
        self._began = clock()
        self._seen: dict[str, float] = {}
        self._from = 0.0
        self._failures = 0
        self._is_live: bool | None = None
        self._looked = 0.0
        self._read: dict[str, int] = {}

    def look(self, platform: PlatformRun | None, *, ended: bool = False) -> None:
        """Pass on what is new; a log that cannot be had now is no reason to stop."""
        if self._failures < _FAILURES:
            self._live()
        due = ended or self._clock() > self._looked + _ARTIFACTS_EVERY_S
        if platform is not None and not self._is_live and due:
            self._looked = self._clock()
            # The next look tries again; without a log the ending is still told.
            with suppress(TunewrightError, OSError):
                self._artifacts(platform)
        if ended:
            for log in self._nodes.values():
                log.end()

    def _live(self) -> None:
        """The endpoint with new lines; after several refusals it is not asked again."""
        query = {
            "from": int(max(0.0, self._from - _OVERLAP_S)),
            "to": int(self._clock()) + 1,
            "page_size": _PAGE,
            "ref.attempt_number": 0,
            "ascending": True,
        }
        try:
            for record in self._pages(query):
                self._take(record)
            self._failures = 0
        except (WorkspaceAway, Missing, Denied):
            # Where lines came before, they come again.
            self._failures += not self._is_live
        except (Refused, ValueError, TypeError, AttributeError):
            # Not offered here, or not as it is known, since it is not documented: it will not be
            # in a minute either.
            self._failures = _FAILURES

    def _pages(self, query: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
        while True:
            page = self._workspace.get(_LIVE.format(run=self._job_run), query, patience_s=0)
            yield from page.get("records") or []
            if not page.get("next_page_token"):
                return
            query = {**query, "page_token": page["next_page_token"]}

    def _take(self, record: Mapping[str, Any]) -> None:
        """One line, once: looks overlap, because lines arrive out of order."""
        when = int(record.get("time_unix_nano") or 0) / 1e9
        key = str(record.get("record_id") or (when, record.get("node_index"), record.get("body")))
        if key in self._seen:
            return
        self._seen[key] = when
        self._from = max(self._from, when)
        self._is_live = True
        if len(self._seen) > 20 * _PAGE:
            known = self._from - 2 * _OVERLAP_S
            self._seen = {k: at for k, at in self._seen.items() if at > known}
        log = self._nodes.get(int(record.get("node_index") or 0))
        if log is not None:
            log.add(str(record.get("body") or "").encode() + b"\n")

    def _artifacts(self, platform: PlatformRun) -> None:
        """New bytes of the log files among the MLflow run's artifacts, chunk by chunk."""
        found = []
        for path, size in platform.artifacts("logs"):
            match = _NODE.match(path)
            if match and int(match[2]) in self._nodes:
                found.append((int(match[2]), int(match[1] or 0), int(match[3] or 0), path, size))
        for node, _, _, path, size in sorted(found):
            before = self._read.get(path, 0)
            if size and size <= before:
                continue
            content = platform.artifact(path)
            self._nodes[node].add(content[before:])
            self._read[path] = len(content)
