"""The messages of a chat, checked one by one and made plain: what a chat template is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from services.frontend.errors import invalid

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Messages with text contents. Raises BatonError(INVALID_REQUEST) with the place at fault, `messages[3].role`."""
    if not isinstance(value, list) or not value:
        raise invalid("'messages' must be a list with at least one message.", "messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(value))


def _message(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise invalid(f"'{where}' must be an object.", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"'{where}.role' must be one of {', '.join(ROLES)}.", f"{where}.role")
    if value.get("content") is None and role not in ("assistant", "function"):
        raise invalid(f"'{where}.content' is missing.", f"{where}.content")
    # Templates know the older name of a developer's message.
    message = {"role": "system" if role == "developer" else role, "content": _content(value.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if value.get(name) is not None:
            message[name] = _string(value, name, where)
    if role == "tool" and "tool_call_id" not in message:
        raise invalid(f"'{where}.tool_call_id' is missing.", f"{where}.tool_call_id")
    if role == "function" and "name" not in message:
        raise invalid(f"'{where}.name' is missing.", f"{where}.name")
    if role == "assistant" and (calls := _calls(value, where)):
        message["tool_calls"] = calls
    return message


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not value:
        raise invalid(f"'{where}.content' must be a string or a list of parts.", f"{where}.content")
    return "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"'{where}' must be an object with a 'type'.", where)
    if kind not in ("text", "refusal"):
        raise invalid(f"Content of type '{kind[:40]}' is not supported by this model.", where)
    return _string(part, kind, where)


def _calls(value: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """What the assistant called, the deprecated single `function_call` included."""
    calls, single = value.get("tool_calls"), value.get("function_call")
    if calls is None and single is not None:
        return [{"type": "function", "function": _function(single, f"{where}.function_call")}]
    if calls is not None and not isinstance(calls, list):
        raise invalid(f"'{where}.tool_calls' must be a list.", f"{where}.tool_calls")
    return [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls or ())]


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise invalid(f"'{where}' must be an object.", where)
    if call.get("type", "function") != "function":
        raise invalid(f"'{where}.type' must be 'function'.", f"{where}.type")
    return {
        "id": _string(call, "id", where),
        "type": "function",
        "function": _function(call.get("function"), f"{where}.function"),
    }


def _function(function: Any, where: str) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise invalid(f"'{where}' must be an object.", where)
    return {
        "name": _string(function, "name", where),
        "arguments": call_arguments(_string(function, "arguments", where)),
    }


def call_arguments(text: str) -> Any:
    """Clients send arguments as JSON text and templates expect the object; what is none stays as the model wrote it."""
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) else text


def _string(value: Mapping[str, Any], name: str, where: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise invalid(f"'{where}.{name}' must be a string.", f"{where}.{name}")
    return text
