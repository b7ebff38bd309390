"""How long a file stays, as OpenAI's `expires_after` says it: so many seconds from when it is made. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.frontend.errors import invalid

ANCHOR = "created_at"
LEAST_S, MOST_S = 3600, 30 * 24 * 3600
DEFAULT_S = MOST_S
"""Of a batch's input, and of its results, when nothing is said."""
FORM = ("expires_after[anchor]", "expires_after[seconds]")
"""Their names in a form."""


def read_output_expiry(value: Any, name: str = "output_expires_after") -> int:
    """Seconds, of a JSON object or null. Raises BatonError with the field at fault."""
    if value is None:
        return DEFAULT_S
    if not isinstance(value, dict):
        raise invalid(f"'{name}' must be an object with 'anchor' and 'seconds'.", name)
    return _seconds(value.get("anchor"), value.get("seconds"), f"{name}.anchor", f"{name}.seconds")


def read_form_expiry(fields: Mapping[str, str]) -> int:
    """Seconds, of a form's fields, if any. Raises BatonError with the field at fault."""
    if other := next((name for name in fields if name.startswith("expires_after") and name not in FORM), None):
        raise invalid(f"A form says it as '{FORM[0]}' and '{FORM[1]}'.", other)
    anchor, seconds = (fields.get(name) for name in FORM)
    if anchor is None and seconds is None:
        return DEFAULT_S
    number = int(seconds) if seconds and seconds.isascii() and seconds.isdecimal() and len(seconds) < 12 else seconds
    return _seconds(anchor, number, *FORM)


def _seconds(anchor: Any, seconds: Any, anchor_name: str, seconds_name: str) -> int:
    if anchor != ANCHOR:
        raise invalid(f"'{anchor_name}' must be {ANCHOR}.", anchor_name)
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not LEAST_S <= seconds <= MOST_S:
        raise invalid(f"'{seconds_name}' must be a whole number from {LEAST_S} to {MOST_S}.", seconds_name)
    return seconds
