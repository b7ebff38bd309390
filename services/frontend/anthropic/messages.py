"""The messages of Anthropic's API, block by block, made into messages of a chat.

Blocks of text are joined by line breaks, and so are messages of the user's that follow each other. Results of tools
become messages of their own. Thoughts of earlier turns are left out, as in chats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.errors import invalid

_ROLES = ("user", "assistant", "system")
_THOUGHTS = ("thinking", "redacted_thinking")


def read_chat(value: Any) -> list[dict[str, Any]]:
    """Messages for a chat template. Raises BatonError(INVALID_REQUEST) with the place, `messages[3].content[0]`."""
    if not isinstance(value, list) or not value:
        raise invalid("'messages' must be a list with at least one message.", "messages")
    out: list[dict[str, Any]] = []
    used: set[str] = set()
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise invalid(f"'{where}' must be an object.", where)
        role = message.get("role")
        if role not in _ROLES:
            raise invalid(f"'{where}.role' must be one of {', '.join(_ROLES)}.", f"{where}.role")
        blocks = _blocks(message.get("content"), f"{where}.content")
        if role == "assistant":
            answer = _answer(blocks, f"{where}.content")
            used.update(call["id"] for call in answer.get("tool_calls", ()))
            out.append(answer)
        else:
            _asked(out, role, blocks, f"{where}.content", used)
    return out


def read_system(value: Any) -> str:
    """`system`: text, or blocks of it. Raises BatonError(INVALID_REQUEST)."""
    if value is None or isinstance(value, str):
        return value or ""
    return _text(_blocks(value, "system"), "system")


def _blocks(value: Any, where: str) -> list[Mapping[str, Any]]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise invalid(f"'{where}' must be a string or a list of blocks.", where)
    for i, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(f"'{where}[{i}]' must be an object with a 'type'.", f"{where}[{i}]")
    return value


def _text(blocks: Sequence[Mapping[str, Any]], where: str) -> str:
    texts = []
    for i, block in enumerate(blocks):
        if block["type"] != "text":
            raise _unsupported(block, f"{where}[{i}]")
        texts.append(_string(block, "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _asked(
    out: list[dict[str, Any]], role: str, blocks: Sequence[Mapping[str, Any]], where: str, used: set[str]
) -> None:
    """A message of the user's (or system's): its text, and the results of tools that it brings."""
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block["type"] == "text":
            text = _string(block, "text", place)
            if out and out[-1]["role"] == role:
                out[-1]["content"] += f"\n{text}"
            else:
                out.append({"role": role, "content": text})
        elif block["type"] == "tool_result" and role == "user":
            id = _string(block, "tool_use_id", place)
            if id not in used:
                raise invalid(f"'{place}.tool_use_id' is of no tool_use block before it.", f"{place}.tool_use_id")
            given = block.get("content")
            content = "" if given is None else _text(_blocks(given, f"{place}.content"), f"{place}.content")
            out.append({"role": "tool", "content": content, "tool_call_id": id})
        else:
            raise _unsupported(block, place)
    if not blocks:
        raise invalid(f"'{where}' must not be empty.", where)


def _answer(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts, calls = [], []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block["type"] == "text":
            texts.append(_string(block, "text", place))
        elif block["type"] == "tool_use":
            calls.append(_call(block, place))
        elif block["type"] not in _THOUGHTS:
            raise _unsupported(block, place)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise invalid(f"'{where}.input' must be an object.", f"{where}.input")
    function = {"name": _string(block, "name", where), "arguments": given}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _unsupported(block: Mapping[str, Any], where: str) -> Exception:
    return invalid(f"'{where}': content of type '{block['type'][:40]}' is not supported by this model.", where)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise invalid(f"'{where}.{name}' must be a string.", f"{where}.{name}")
    return text
