"""The CLI as a client of a frontend that asks for keys."""

from __future__ import annotations

import os
from pathlib import Path

from baton.cli.errors import CliError


def authorization() -> dict[str, str]:
    """The header with the first key of the file that `BATON_API_KEYS_FILE` names; nothing when none is named.

    Raises CliError when the file cannot be read or has no key.
    """
    path = os.environ.get("BATON_API_KEYS_FILE")
    if not path:
        return {}
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, ValueError) as error:
        raise CliError(f"BATON_API_KEYS_FILE: {error}", "name the file that the frontend was started with") from error
    for line in lines:
        if line and not line.startswith("#"):
            return {"authorization": f"Bearer {line.split()[0]}"}  # behind it may be its tenant
    raise CliError(f"BATON_API_KEYS_FILE: {path} has no key", "one key a line; # begins a comment")
