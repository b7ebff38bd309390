"""Tools of a response: functions, told flat; and how free the model is to call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.frontend.errors import invalid
from services.frontend.tools import Function, Tools, check_function, chosen, read_functions

_TOLD = ("name", "description", "parameters", "strict")


def read_response_tools(raw: Mapping[str, Any], parallel: bool) -> Tools | None:
    """`tools` and `tool_choice`; None without tools. Raises BatonError(INVALID_REQUEST)."""
    functions = read_functions(raw.get("tools"), _function)
    choice = raw.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice, functions, parallel)
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return chosen(choice, functions, parallel)


def told_tools(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools as the answer repeats them."""
    return [{"type": "function", **{name: tool.get(name) for name in _TOLD}} for tool in raw.get("tools") or ()]


def _function(tool: Any, where: str) -> Function:
    if not isinstance(tool, dict):
        raise invalid(f"'{where}' must be an object.", where)
    if tool.get("type") != "function":
        named = str(tool.get("type"))[:40]
        raise invalid(
            f"'{where}.type' is '{named}': this server runs no tools of its own, only functions can be offered.",
            f"{where}.type",
        )
    function = {name: tool[name] for name in _TOLD if tool.get(name) is not None}
    return check_function(tool, {"type": "function", "function": function}, where)


def _allowed(choice: Mapping[str, Any], functions: tuple[Function, ...], parallel: bool) -> Tools | None:
    """Some of the functions, with a freedom of their own."""
    mode, listed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise invalid("'tool_choice.mode' must be auto or required.", "tool_choice.mode")
    names = [tool.get("name") for tool in listed if isinstance(tool, dict)] if isinstance(listed, list) else []
    if not names:
        raise invalid("'tool_choice.tools' must be a list of functions.", "tool_choice.tools")
    known = {function.name for function in functions}
    for name in names:
        if name not in known:
            raise invalid(
                f"'tool_choice.tools' names '{str(name)[:64]}', which is not in 'tools'.", "tool_choice.tools"
            )
    return chosen(mode, tuple(function for function in functions if function.name in names), parallel)
