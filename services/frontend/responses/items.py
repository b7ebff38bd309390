"""The items of a response's input: checked one by one, kept as they are told again, made into messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from services.frontend.errors import invalid
from services.frontend.messages import call_arguments
from services.frontend.responses.refer import Item, is_reference

ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Content parts that are text, and the member that has it."""


def read_input(value: Any, known: Mapping[str, Item]) -> list[Item]:
    """`input` as items, `known` being those that it refers to.

    Raises BatonError(INVALID_REQUEST) with the place at fault, `input[2].content[0]`.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "status": "completed", "content": [_input_text(value)]}]
    if not isinstance(value, list) or not value:
        raise invalid("'input' must be a string, or a list with at least one item.", "input")
    return [known[item["id"]] if is_reference(item) else _item(item, f"input[{i}]") for i, item in enumerate(value)]


def identified(items: Iterable[Item], uid: str) -> list[Item]:
    """The items, those without an id with one."""
    prefixes = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    return [
        {"id": item.get("id") or f"{prefixes.get(item['type'], 'msg')}_{uid}i{number}", **item}
        for number, item in enumerate(items)
    ]


def messages_of(earlier: Iterable[Item], items: Iterable[Item]) -> list[dict[str, Any]]:
    """A conversation as a chat template knows it: calls are part of the assistant's message before them.

    Thoughts of earlier turns are left out, as in chats. Raises BatonError(INVALID_REQUEST): an output of no call.
    """
    out: list[dict[str, Any]] = []
    called: set[str] = set()
    numbered = [*((item, "") for item in earlier), *((item, f"input[{i}]") for i, item in enumerate(items))]
    for item, where in numbered:
        match item["type"]:
            case "message":
                role = "system" if item["role"] == "developer" else item["role"]
                out.append({"role": role, "content": "".join(part.get("text", "") for part in item["content"])})
            case "function_call":
                called.add(item["call_id"])
                if not out or out[-1]["role"] != "assistant":
                    out.append({"role": "assistant", "content": ""})
                out[-1].setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                if item["call_id"] not in called:
                    text = f"'{where}.call_id' is of no function call before it."
                    raise invalid(text, f"{where}.call_id")
                out.append({"role": "tool", "content": _output_text(item["output"]), "tool_call_id": item["call_id"]})
    return out


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": call_arguments(item["arguments"])}
    return {"id": item["call_id"], "type": "function", "function": function}


def _output_text(output: Any) -> str:
    return output if isinstance(output, str) else "".join(part["text"] for part in output)


def _item(value: Any, where: str) -> Item:
    if not isinstance(value, dict):
        raise invalid(f"'{where}' must be an object.", where)
    kind = value.get("type", "message")
    if kind == "message":
        return _message(value, where)
    if kind == "function_call":
        texts = {name: _string(value, name, where) for name in ("call_id", "name", "arguments")}
        return _kept(value, where, {"type": kind, "status": "completed", **texts})
    if kind == "function_call_output":
        output = value.get("output")
        if not isinstance(output, str):
            output = _parts(output, f"{where}.output")
        return _kept(
            value,
            where,
            {"type": kind, "status": "completed", "call_id": _string(value, "call_id", where), "output": output},
        )
    if kind == "reasoning":
        return _kept(value, where, {"type": kind, "summary": _list(value, "summary", where), "content": _list(value, "content", where)})  # fmt: skip # noqa: E501
    named = str(kind)[:40]
    raise invalid(f"'{where}.type' is '{named}', which is not supported by this server.", f"{where}.type")


def _message(value: Mapping[str, Any], where: str) -> Item:
    role = value.get("role")
    if role not in ROLES:
        raise invalid(f"'{where}.role' must be one of {', '.join(ROLES)}.", f"{where}.role")
    content = value.get("content")
    if isinstance(content, str):
        content = [_output_part(content) if role == "assistant" else _input_text(content)]
    else:
        content = _parts(content, f"{where}.content", answer=role == "assistant")
    return _kept(value, where, {"type": "message", "role": role, "status": "completed", "content": content})


def _parts(value: Any, where: str, *, answer: bool = False) -> list[Item]:
    if not isinstance(value, list):
        raise invalid(f"'{where}' must be a string or a list of parts.", where)
    return [_part(part, f"{where}[{i}]", answer=answer) for i, part in enumerate(value)]


def _part(part: Any, where: str, *, answer: bool) -> Item:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"'{where}' must be an object with a 'type'.", where)
    if kind not in _TEXTS:
        raise invalid(f"Content of type '{kind[:40]}' is not supported by this model.", where)
    text = _string(part, _TEXTS[kind], where)
    return _output_part(text) if answer else _input_text(text)


def _input_text(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _output_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": []}


def _kept(value: Mapping[str, Any], where: str, item: Item) -> Item:
    return item if value.get("id") is None else {"id": _string(value, "id", where), **item}


def _list(value: Mapping[str, Any], name: str, where: str) -> list[Any]:
    given = value.get(name)
    if given is not None and not isinstance(given, list):
        raise invalid(f"'{where}.{name}' must be a list.", f"{where}.{name}")
    return given or []


def _string(value: Mapping[str, Any], name: str, where: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise invalid(f"'{where}.{name}' must be a string.", f"{where}.{name}")
    return text
