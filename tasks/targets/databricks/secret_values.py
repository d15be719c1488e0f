"""A secret's value from a Databricks workspace, for the targets that need it on this side."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path

from tasks.targets.databricks.api import Refused, connect
from tunewright.contract.failures import UserError

_VARIABLES = ("DATABRICKS_HOST", "DATABRICKS_CONFIG_PROFILE")


def value_of(reference: str) -> str:
    """The value of `scope/key`; raises UserError that says why there is none.

    A workspace may let it be read from its notebooks alone.
    """
    if not _is_configured():
        raise UserError("no Databricks workspace is configured")
    scope, key = reference.split("/", 1)
    workspace = connect()
    try:
        found = workspace.get("/api/2.0/secrets/get", {"scope": scope, "key": key})
        return base64.b64decode(found["value"], validate=True).decode()
    except Refused as error:
        raise UserError(f"the Databricks workspace does not give it ({error})") from None
    except (KeyError, binascii.Error, UnicodeDecodeError):
        raise UserError(f"what {workspace.host} gives for it is no text") from None


def _is_configured() -> bool:
    """Whether somebody said which workspace: the SDK would go through every way to log in."""
    profiles = os.environ.get("DATABRICKS_CONFIG_FILE") or "~/.databrickscfg"
    return any(map(os.environ.get, _VARIABLES)) or Path(profiles).expanduser().is_file()
