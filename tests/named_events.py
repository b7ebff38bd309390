"""Server-sent events that have names, as the Responses API and Anthropic's write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Wrong = Callable[[str], None]


def named_events(raw: bytes, wrong: Wrong) -> list[dict[str, Any]]:
    """The data of each event; `wrong` is told of what is not one."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        wrong(f"not UTF-8: {error.reason}")
        text = raw.decode(errors="replace")
    if "\ufffd" in text or "\\ufffd" in text:
        wrong("a replacement character")
    if not text.endswith("\n\n"):
        wrong("the last event is not complete")
    return [event for one in text.removesuffix("\n\n").split("\n\n") if (event := _event(one, wrong)) is not None]


def _event(text: str, wrong: Wrong) -> dict[str, Any] | None:
    lines = text.split("\n")
    if len(lines) != 2 or not lines[0].startswith("event: ") or not lines[1].startswith("data: "):
        wrong(f"not an event: {text[:80]!r}")
        return None
    try:
        event = json.loads(lines[1].removeprefix("data: "))
    except ValueError:
        wrong(f"not JSON: {text[:80]!r}")
        return None
    if not isinstance(event, dict) or event.get("type") != lines[0].removeprefix("event: "):
        wrong(f"the event's name is not its type: {text[:80]!r}")
        return None
    return event
