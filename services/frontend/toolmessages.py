"""Calls and their results in the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from services.frontend.errors import invalid


def read_calls(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The members of a message that tell of calls. Raises BatonError(INVALID_REQUEST)."""
    if message["role"] == "tool":
        return {"tool_call_id": _string(message, "tool_call_id", where)}
    calls = message.get("tool_calls")
    if calls is None or message["role"] != "assistant":
        return {}
    if not isinstance(calls, list):
        raise invalid(f"'{where}.tool_calls' must be a list.", f"{where}.tool_calls")
    read = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {"tool_calls": read} if read else {}


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise invalid(f"'{where}.function' must be an object.", f"{where}.function")
    function = call["function"]
    name = _string(function, "name", f"{where}.function")
    text = _string(function, "arguments", f"{where}.function")
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        arguments = text
    return {"id": _string(call, "id", where), "type": "function", "function": {"name": name, "arguments": arguments}}


def _string(value: Mapping[str, Any], name: str, where: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise invalid(f"'{where}.{name}' must be a string.", f"{where}.{name}")
    return text
