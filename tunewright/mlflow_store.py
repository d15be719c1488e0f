"""Which MLflow store is meant, and what its errors mean for the user.

Without MLFLOW_TRACKING_URI that is a SQLite database under TUNEWRIGHT_HOME. Imports mlflow only
when a client is asked for.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.rundir import home

if TYPE_CHECKING:
    from mlflow import MlflowClient

WAIT_S = 20.0
"""How long a tracking server that does not answer is waited for."""
_TEMPORARY = {
    "TEMPORARILY_UNAVAILABLE",
    "INTERNAL_ERROR",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
}
_DENIED = {"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"}


class StoreUnavailable(TunewrightError):
    """The tracking server or its database does not answer; worth another attempt."""

    failure_class = "infrastructure"


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or the database under TUNEWRIGHT_HOME."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def registry_uri() -> str:
    """MLFLOW_REGISTRY_URI, or the tracking store."""
    return os.environ.get("MLFLOW_REGISTRY_URI") or tracking_uri()


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def default_artifact_location(experiment: str) -> str | None:
    """Where artifacts of an experiment go when the store is ours; None leaves it to the store."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return None
    return (home() / "mlartifacts" / quote(experiment, safe=" ")).as_uri()


def connect() -> MlflowClient:
    """A client for the tracking and registry stores of this environment.

    A server is waited for up to WAIT_S seconds; a local database is made if it is not there yet.
    Raises StoreUnavailable or UserError.
    """
    tracking, registry = tracking_uri(), registry_uri()
    for uri in {tracking, registry}:
        if is_server(uri):
            _await_server(uri, WAIT_S)
    _settings()
    from mlflow import MlflowClient

    with explained(), _alone(tracking):
        client = MlflowClient(tracking_uri=tracking, registry_uri=registry)
        # Opening the store makes a new database's tables, which no two processes may do at once.
        client.search_experiments(max_results=1)
    if registry != tracking:
        with explained(), _alone(registry):
            client.search_registered_models(max_results=1)
    return client


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors of MLflow into one sentence: what was asked for is wrong, or nobody answers."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        text = " ".join(str(error).split())
        if error.error_code in _DENIED:
            raise UserError(f"MLflow at {_shown(tracking_uri())} refused: {text}") from error
        if error.error_code in _TEMPORARY:
            raise StoreUnavailable(
                f"MLflow at {_shown(tracking_uri())} failed: {text[:500]}"
            ) from error
        raise UserError(f"MLflow: {text[:500]}") from error
    except OSError as error:
        raise StoreUnavailable(f"MLflow's artifacts could not be written: {error}") from error


def _settings() -> None:
    """Quick to fail and quiet; what the user has set stays."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "4")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _await_server(uri: str, wait_s: float) -> None:
    """Until the server's port accepts a connection. MLflow itself would try for many minutes."""
    parts = urlsplit(uri)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return
    end = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise StoreUnavailable(
                    f"the MLflow server at {_shown(uri)} does not answer after {wait_s:.0f} s "
                    f"({error}); start it, or unset MLFLOW_TRACKING_URI to use the local database"
                ) from error
        time.sleep(0.5)


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Hold the lock of a SQLite database's file; other stores look after themselves."""
    path = _sqlite_file(uri)
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise UserError(f"the MLflow database {path} cannot be used: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sqlite_file(uri: str) -> Path | None:
    match = re.match(r"sqlite(?:\+\w+)?:///(.+?)(?:\?|$)", uri)
    return Path(unquote(match[1])) if match and match[1] != ":memory:" else None


def _shown(uri: str) -> str:
    """The address without a password."""
    return re.sub(r"//[^/@]*@", "//", uri)
