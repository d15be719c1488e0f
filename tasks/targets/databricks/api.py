"""The connection to a Databricks workspace: asked with patience, its refusals told in a sentence.

Authentication is databricks-sdk's own: environment, profile, OAuth, service principal. The SDK is
imported when a connection is made, never before. Only the endpoints that
`tasks.targets.databricks.request` and its neighbours name are used, as plain JSON: a field that
this SDK does not know yet comes through.
"""

from __future__ import annotations

import configparser
import io
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import tunewright
from tunewright.contract.failures import TunewrightError, UserError

PATIENCE_S = 180.0
"""How long a call is repeated while the workspace is away, busy or broken."""
_SDK_PATIENCE_S = 30
_PAUSE_S = (0.5, 8.0)
_TIMEOUT_S = 60.0
_SENDINGS = 3
_PART_TRIES = 1000
"""More than a part can use up within PATIENCE_S: that alone ends its repetition."""
_REFUSALS = ("Unauthenticated", "PermissionDenied")
_TRANSFER = re.compile(r"chunk upload|server response|max retry attempts")
_BAD_LOGINS = ("invalid_client", "invalid_grant", "unauthorized_client", "access_denied")


class WorkspaceAway(TunewrightError):
    """The workspace did not answer, or not well, for as long as it was asked; it may later."""

    failure_class = "infrastructure"


class Refused(UserError):
    """The workspace understood and said no; asking again gets the same answer."""


class Missing(Refused):
    """What was asked for is not there, or not for us to see."""


class NotOffered(Refused):
    """This workspace does not have the endpoint, or has it switched off."""


class Denied(Refused):
    """We may not."""


class Workspace:
    """One workspace as one user. Its calls may come from several threads."""

    def __init__(self, client: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """`client` is the SDK's WorkspaceClient; `clock` counts seconds."""
        self._client = client
        self._clock = clock
        self._who: dict[str, Any] | None = None
        self._mutex = threading.Lock()
        self.patience_s: float | None = None
        """How long each call is repeated; PATIENCE_S when it is not set."""

    @property
    def host(self) -> str:
        """https://…, without a slash at the end."""
        return str(self._client.config.host).rstrip("/")

    @property
    def auth(self) -> str:
        """How we authenticated, in the SDK's word: pat, oauth-m2m, databricks-cli, …"""
        return str(self._client.config.auth_type)

    @property
    def account_id(self) -> str | None:
        return self._client.config.account_id or None

    @property
    def me(self) -> str:
        """The user's or service principal's name, as it is in /Workspace/Users."""
        return str(self._identity()["userName"])

    @property
    def principals(self) -> set[str]:
        """Whom a grant may name for it to be ours: us, our groups, everybody."""
        groups = (group.get("display") for group in self._identity().get("groups") or [])
        return {self.me, "account users", *filter(None, groups)}

    def _identity(self) -> dict[str, Any]:
        with self._mutex:
            if self._who is None:
                self._who = self.get("/api/2.0/preview/scim/v2/Me")
            return self._who

    def get(
        self, path: str, query: Mapping[str, Any] | None = None, *, patience_s: float | None = None
    ) -> dict[str, Any]:
        return self._json("GET", path, query=query, patience_s=patience_s)

    def post(
        self, path: str, body: Mapping[str, Any], *, patience_s: float | None = None
    ) -> dict[str, Any]:
        """Sent again until an answer comes: what it asks for must be safe to repeat."""
        return self._json("POST", path, body=body, patience_s=patience_s)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("PATCH", path, body=body)

    def put(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._json("PUT", path, body=body)

    def delete(self, path: str) -> dict[str, Any]:
        return self._json("DELETE", path)

    def send(
        self, method: str, path: str, content: Callable[[], BinaryIO], query: Mapping[str, Any]
    ) -> None:
        """Send bytes; `content` opens them afresh for each attempt."""

        def once() -> Any:
            with content() as data:
                octets = {"Content-Type": "application/octet-stream"}
                return self._do(method, path, query=query, headers=octets, data=data)

        self._patiently(once)

    def send_parts(
        self, source: Path, target: str, part_bytes: int, at_once: int, arrived: Callable[[], bool]
    ) -> None:
        """A large file to a volume in parts, as the SDK sends them: each is repeated by itself.

        Where the workspace or its storage takes no parts, the SDK sends the file whole. `arrived`
        is asked after an error: the file may be there although the last answer was lost.
        """
        for more in reversed(range(_SENDINGS)):
            try:
                with source.open("rb") as data:
                    self._transfers.upload(
                        target, data, overwrite=True, part_size=part_bytes, parallelism=at_once
                    )
                return
            except Exception as error:
                if arrived():
                    return
                told = _of_transfer(error, self.host)
                # A time-out was long enough; the rest is what the SDK does not repeat by itself.
                if isinstance(error, TimeoutError) or not (
                    more and isinstance(told, WorkspaceAway)
                ):
                    raise told from None
            time.sleep(_PAUSE_S[0])

    @cached_property
    def _transfers(self) -> Any:
        """The SDK's transfers, with our patience for each part instead of its own few tries."""
        config = self._client.config.copy()
        config.retry_timeout_seconds = PATIENCE_S
        config.experimental_files_ext_cloud_api_max_retries = _PART_TRIES
        return type(self._client)(config=config).files

    def read(self, path: str, start: int = 0) -> BinaryIO:
        """The bytes at a path from byte `start`, as a stream for the caller to close."""
        headers = {"Accept": "application/octet-stream"}
        if start:
            headers["Range"] = f"bytes={start}-"
        found = self._patiently(lambda: self._do("GET", path, headers=headers, raw=True))
        stream: BinaryIO = found["contents"]
        return stream

    def head(self, path: str, *, patience_s: float | None = None) -> dict[str, Any]:
        """{"content-length", "last-modified"} of a file; raises Missing."""
        wanted = ["content-length", "last-modified"]
        return dict(
            self._patiently(lambda: self._do("HEAD", path, response_headers=wanted), patience_s)
        )

    def _json(
        self, method: str, path: str, patience_s: float | None = None, **rest: Any
    ) -> dict[str, Any]:
        accept = {"Accept": "application/json"}
        kept = {key: value for key, value in rest.items() if value is not None}
        found: dict[str, Any] = self._patiently(
            lambda: self._do(method, path, headers=accept, **kept), patience_s
        )
        return found

    def _do(self, method: str, path: str, **rest: Any) -> Any:
        return self._client.api_client.do(method, path, **rest)

    def _patiently(self, call: Callable[[], Any], patience_s: float | None = None) -> Any:
        """The call's answer, repeated while a repetition may help.

        429 and 503 the SDK itself repeats as Retry-After says; the rest is ours.
        """
        if patience_s is None:
            patience_s = PATIENCE_S if self.patience_s is None else self.patience_s
        end, pause = self._clock() + patience_s, _PAUSE_S[0]
        while True:
            try:
                return call()
            except Exception as error:
                told = _explained(error, self.host)
                if not isinstance(told, WorkspaceAway) or self._clock() + pause > end:
                    raise told from None
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _PAUSE_S[1])


def connect() -> Workspace:
    """The workspace that this environment is configured for; raises UserError without one."""
    try:
        from databricks.sdk import WorkspaceClient
        from databricks.sdk.core import Config
    except ImportError:
        raise UserError(
            "target databricks needs databricks-sdk here; pip install 'tunewright[databricks]'"
        ) from None
    # It warns of each way to authenticate that a workspace does not offer.
    logging.getLogger("databricks.sdk").setLevel(logging.ERROR)
    try:
        config = Config(
            retry_timeout_seconds=_SDK_PATIENCE_S,
            http_timeout_seconds=_TIMEOUT_S,
            product="tunewright",
            product_version=tunewright.__version__,
        )
        return Workspace(WorkspaceClient(config=config))
    except (ValueError, OSError, configparser.Error) as error:
        # Its own words name each way that was tried; the first line says enough.
        reason = _first(str(error)).partition(". Config:")[0]
        raise UserError(
            f"no Databricks workspace is configured: {reason}; log in with "
            "`databricks auth login`, or set DATABRICKS_HOST and DATABRICKS_TOKEN "
            "(or DATABRICKS_CONFIG_PROFILE)"
        ) from None


def quoted(path: str) -> str:
    """A path of a volume or workspace as part of an address."""
    return quote(path, safe="/")


def opened(content: bytes | Path) -> Callable[[], BinaryIO]:
    """What `Workspace.send` opens: bytes or a file."""
    return lambda: content.open("rb") if isinstance(content, Path) else io.BytesIO(content)


def _explained(error: Exception, host: str) -> Exception:
    """An error of the SDK as one of ours; others as they are."""
    from databricks.sdk.errors.base import DatabricksError

    names = {kind.__name__ for kind in type(error).__mro__}
    # Behind a refusal the SDK lists its whole configuration.
    text = _first(str(error)).partition(". Config:")[0] or type(error).__name__
    if isinstance(error, DatabricksError):
        code = error.error_code or ""
        return _of_platform(names, code, text, host)
    if isinstance(error, TimeoutError) or names & {"RequestException", "HTTPError"}:
        cause = error.__cause__ or error
        if "InvalidURL" in names | {type(cause).__name__}:
            return Refused(f"DATABRICKS_HOST is no address: {_first(str(cause))}")
        return WorkspaceAway(f"the workspace {host} does not answer: {_first(str(cause))}")
    is_local = isinstance(error, OSError) and error.filename is not None
    if isinstance(error, ValueError | OSError | NotImplementedError | RuntimeError):
        return error if is_local else _of_login(error, text, host)
    return error


def _of_transfer(error: Exception, host: str) -> Exception:
    """An error of a transfer in parts; those of its own that the SDK raises are bare, too."""
    if type(error) in (ValueError, RuntimeError) and _TRANSFER.search(str(error)):
        return WorkspaceAway(f"the workspace {host} takes no parts of a file: {_first(str(error))}")
    return _explained(error, host)


def _of_login(error: Exception, text: str, host: str) -> TunewrightError:
    """What the SDK raises when a call finds no valid token and gets no new one: bare errors.

    A login that has lapsed in mid-run is as passing as a workspace that is away.
    """
    if isinstance(error, UnicodeError) or "header value" in text:
        # Its own words hold the token.
        return Denied(
            f"the token for {host} holds a line end, a blank or another character that no token "
            "has; set it anew"
        )
    if text.partition(":")[0] in _BAD_LOGINS:
        return Denied(f"{host} refused the login: {text}")
    return WorkspaceAway(f"logging in to {host} fails: {text}")


def _of_platform(names: set[str], code: str, text: str, host: str) -> TunewrightError:
    said = f"{text} ({code})" if code and code not in text else text
    if code in ("FEATURE_DISABLED", "ENDPOINT_NOT_FOUND") or "NotImplemented" in names:
        return NotOffered(f"{host} does not offer this: {said}")
    if names & {"NotFound"}:
        return Missing(f"{host}: {said}")
    if names & set(_REFUSALS):
        return Denied(f"{host} refused: {said}")
    if names & {"BadRequest", "ResourceConflict", "Cancelled", "OperationFailed"}:
        return Refused(f"{host} refused: {said}")
    return WorkspaceAway(f"the workspace {host} fails: {said}")


def _first(text: str) -> str:
    """The first line, short enough for a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:500].rstrip(".") if lines else ""
