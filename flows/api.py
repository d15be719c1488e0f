"""The Prefect API as its settings name it, by HTTP: `list` and `cancel` need no Prefect import."""

from __future__ import annotations

import base64
import os
import tomllib
from pathlib import Path
from typing import Any

import httpx

from tunewright.contract.failures import TunewrightError

_TIMEOUT_S = 10.0


class ApiFailed(TunewrightError):
    """The Prefect API could not be reached, or refused."""


def setting(name: str) -> str | None:
    """A Prefect setting from the environment, else from the active profile."""
    if value := os.environ.get(name):
        return value
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    path = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml")
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return None
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active")
    value = profiles.get("profiles", {}).get(active, {}).get(name)
    return str(value) if value else None


def url() -> str | None:
    """The configured API; None when there is none."""
    return setting("PREFECT_API_URL")


def flow_runs(limit: int) -> list[dict[str, Any]]:
    """The newest flow runs of `sft` that have begun, as the API tells them."""
    begun = {"start_time": {"is_null_": False}}
    query = {
        "flows": {"name": {"any_": ["sft"]}},
        "flow_runs": begun,
        "sort": "START_TIME_DESC",
        "limit": limit,
    }
    found: list[dict[str, Any]] = _post("/flow_runs/filter", query)
    return found


def cancel(run: str) -> int:
    """Set the flow runs tagged with this run to CANCELLING; how many were still going on."""
    going = {"type": {"any_": ["RUNNING", "PENDING", "SCHEDULED", "PAUSED"]}}
    query = {"flow_runs": {"tags": {"all_": [f"run:{run}"]}, "state": going}}
    found = _post("/flow_runs/filter", query)
    for flow_run in found:
        state = {"type": "CANCELLING", "message": "tunewright cancel"}
        _post(f"/flow_runs/{flow_run['id']}/set_state", {"state": state})
    return len(found)


def _post(path: str, body: dict[str, Any]) -> Any:
    base = (url() or "").rstrip("/")
    try:
        answer = httpx.post(f"{base}{path}", json=body, headers=headers(), timeout=_TIMEOUT_S)
        answer.raise_for_status()
        return answer.json()
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        raise ApiFailed(f"the Prefect API at {base} answered {code} to {path}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ApiFailed(
            f"the Prefect API at {base} cannot be reached ({error}); "
            "start it, or unset PREFECT_API_URL"
        ) from None
    except ValueError:
        raise ApiFailed(
            f"what answers at {base} is not the Prefect API; PREFECT_API_URL ends in /api"
        ) from None


def headers() -> dict[str, str]:
    """What the API wants to know of the caller, as Prefect's own client sends it."""
    if key := setting("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    if pair := setting("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}
