"""Tools of Anthropic's API: functions with an `input_schema`, and how free the model is to call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.frontend.errors import invalid
from services.frontend.tools import Function, Tools, check_function, chosen, read_functions

_FREEDOMS = {"auto": "auto", "any": "required", "none": "none"}


def read_message_tools(raw: Mapping[str, Any]) -> Tools | None:
    """`tools` and `tool_choice`; None without tools. Raises BatonError(INVALID_REQUEST)."""
    functions = read_functions(raw.get("tools"), _function)
    choice = raw.get("tool_choice")
    if choice is None:
        return chosen(None, functions, True)
    param = "tool_choice"
    if not isinstance(choice, dict):
        raise invalid(f"'{param}' must be an object.", param)
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        where = f"{param}.disable_parallel_tool_use"
        raise invalid(f"'{where}' must be true or false.", where)
    kind = choice.get("type")
    if kind == "tool":
        named = {"type": "function", "function": {"name": choice.get("name")}}
        return chosen(named, functions, not alone)
    if not isinstance(kind, str) or kind not in _FREEDOMS:
        raise invalid(f"'{param}.type' must be one of auto, any, tool and none.", f"{param}.type")
    return chosen(_FREEDOMS[kind], functions, not alone)


def _function(tool: Any, where: str) -> Function:
    if not isinstance(tool, dict):
        raise invalid(f"'{where}' must be an object.", where)
    if tool.get("type") not in (None, "custom"):
        named = str(tool["type"])[:40]
        text = f"'{where}.type' is '{named}': this server runs no tools of its own, only custom ones can be offered."
        raise invalid(text, f"{where}.type")
    if tool.get("input_schema") is None:
        raise invalid(f"'{where}.input_schema' is missing.", f"{where}.input_schema")
    told = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    function = {new: tool[name] for name, new in told.items() if tool.get(name) is not None}
    return check_function(tool, {"type": "function", "function": function}, where, "input_schema")
