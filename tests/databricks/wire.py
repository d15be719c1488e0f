"""Requests as values, routes, injected faults: what every part of the stand-in speaks."""

from __future__ import annotations

import fnmatch
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

REFUSALS = {
    "429": ("RESOURCE_EXHAUSTED", "Current request rate exceeds the limit"),
    "500": ("INTERNAL_ERROR", "Internal error"),
    "503": ("TEMPORARILY_UNAVAILABLE", "The service is temporarily unavailable"),
    "403": ("PERMISSION_DENIED", "The caller does not have permission"),
    "404": ("RESOURCE_DOES_NOT_EXIST", "The resource does not exist"),
}
WORKSPACE_ID = "4242"
KINDS = (*REFUSALS, "slow", "cut", "lost", "torn")


@dataclass
class ApiError(Exception):
    """A refusal, as the platform words it: HTTP status, error code, message."""

    status: int
    code: str
    message: str


def invalid(message: str) -> ApiError:
    return ApiError(400, "INVALID_PARAMETER_VALUE", message)


def missing(message: str) -> ApiError:
    return ApiError(404, "RESOURCE_DOES_NOT_EXIST", message)


@dataclass
class Answer:
    """What a handler gives back: `body` is a JSON value, bytes, or chunks of `length` bytes."""

    body: Any = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


@dataclass
class Request:
    """One request as a value; `status` and `ended` follow once it is answered.

    `body`: the JSON value; a form as a dict with its content as text; {"bytes": n} for raw bytes;
    None when there is none. `started` and `ended` are seconds of the monotonic clock. `status` is
    None when the connection was cut instead. `fault` names the kind that was injected. `origin` is
    whose token it bore: "client", "node", or "" for none.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str] = field(repr=False)
    stream: Any = field(repr=False, compare=False)
    body: Any = None
    raw: bytes = field(default=b"", repr=False)
    form: dict[str, bytes] = field(default_factory=dict, repr=False)
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    status: int | None = None
    fault: str | None = None
    origin: str = ""

    @property
    def value(self) -> dict[str, Any]:
        """What a recorded file compares: method, path, query, body."""
        return {"method": self.method, "path": self.path, "query": self.query, "body": self.body}

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the body, else of the query."""
        body = self.body if isinstance(self.body, dict) else {}
        return body.get(name, self.query.get(name, default))

    def need(self, name: str) -> Any:
        """A field that must be there; raises ApiError when it is not."""
        if (found := self.get(name)) in (None, ""):
            raise invalid(f"Missing required field: {name}")
        return found

    def number(self, name: str, default: int) -> int:
        try:
            return int(self.get(name, default))
        except ValueError:
            raise invalid(f"{name} is not a number") from None

    def true(self, name: str, default: bool = False) -> bool:
        return str(self.get(name, default)).lower() == "true"


@dataclass
class Fault:
    """Disturbs requests that match: of them the first `after` pass, the next `times` are hit."""

    pattern: str
    kind: str
    times: int
    after: int
    seconds: float
    origin: str | None = None
    then: Callable[[], None] = lambda: None

    def takes(self, request: Request) -> bool:
        """Whether this request is hit; counts it."""
        subject = f"{request.method} {request.path}" if " " in self.pattern else request.path
        if self.origin not in (None, request.origin):
            return False
        if not fnmatch.fnmatchcase(subject, self.pattern):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        return self.times >= 0


Handler = Callable[..., Any]
"""Takes the request and the groups of its route; returns an Answer or a JSON value."""


@dataclass
class Wire:
    """Routes, faults and the record of what came in."""

    tokens: dict[str, str]
    """Bearer token to origin."""
    routes: list[tuple[str, re.Pattern[str], Handler, bool]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def route(self, method: str, pattern: str, handler: Handler, *, stream: bool = False) -> None:
        """Serve `method pattern`; a `stream` handler reads `request.stream` itself."""
        self.routes.append((method, re.compile(pattern), handler, stream))

    def record(self, request: Request) -> Fault | None:
        """Keep a request, and say what shall disturb it."""
        with self.lock:
            self.requests.append(request)
            hits = [fault for fault in self.faults if fault.takes(request)]
        request.fault = hits[0].kind if hits else None
        return hits[0] if hits else None

    def find(self, method: str, path: str) -> tuple[Handler, tuple[str, ...], bool]:
        """The handler of a raw path, its groups unquoted, and whether it reads the stream."""
        for wanted, pattern, handler, stream in self.routes:
            if wanted in (method, "*") and (match := pattern.fullmatch(path)):
                return handler, tuple(unquote(group or "") for group in match.groups()), stream
        raise ApiError(404, "ENDPOINT_NOT_FOUND", f"No API found for '{method} {path}'")


def now_ms() -> int:
    return int(time.time() * 1000)


def shown(data: bytes) -> Any:
    """Bytes as a record shows them: text as text, the rest by its size."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"bytes": len(data)}
