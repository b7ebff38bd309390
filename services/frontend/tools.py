"""Tools as clients describe them: functions, and how free the model is to call them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from services.frontend.errors import invalid
from services.frontend.schema_shape import check_schema

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Freedom = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True)
class Function:
    """One function. `parameters` is a JSON schema of an object; `raw` is the tool as the client sent it."""

    name: str
    parameters: dict[str, Any]
    raw: dict[str, Any]
    where: str
    """Its place in the body: `tools[0].function`."""
    member: str = "parameters"
    """What its schema is called there."""

    @property
    def schema_param(self) -> str:
        """The place of its schema in the body."""
        return f"{self.where}.{self.member}"


@dataclass(frozen=True)
class Tools:
    """The functions that may be called here, at least one. `named`: only the one that must be."""

    functions: tuple[Function, ...]
    freedom: Freedom = "auto"
    parallel: bool = True

    @property
    def callable(self) -> tuple[Function, ...]:
        """Those that an answer may call."""
        return () if self.freedom == "none" else self.functions


def read_tools(raw: Mapping[str, Any]) -> Tools | None:
    """`tools`, `tool_choice` and `parallel_tool_calls`; None without tools. Raises BatonError(INVALID_REQUEST)."""
    functions = read_functions(raw.get("tools"), _function)
    parallel = raw.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise invalid("'parallel_tool_calls' must be true or false.", "parallel_tool_calls")
    return chosen(raw.get("tool_choice"), functions, parallel is not False)


def read_functions(given: Any, read: Callable[[Any, str], Function]) -> tuple[Function, ...]:
    """The functions in a list of tools, each by `read`, which is told its place. Raises BatonError(INVALID_REQUEST)."""
    if given is not None and not isinstance(given, list):
        raise invalid("'tools' must be a list.", "tools")
    if given and len(given) > MAX_TOOLS:
        raise invalid(f"'tools' takes up to {MAX_TOOLS} functions.", "tools")
    functions = tuple(read(tool, f"tools[{i}]") for i, tool in enumerate(given or ()))
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        twice = next(i for i, name in enumerate(names) if name in names[:i])
        where = f"{functions[twice].where}.name"
        raise invalid(f"'{where}' is taken: '{names[twice]}'.", where)
    return functions


def _function(tool: Any, where: str) -> Function:
    if not isinstance(tool, dict):
        raise invalid(f"'{where}' must be an object.", where)
    if tool.get("type") != "function":
        raise invalid(f"'{where}.type' must be 'function'.", f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"'{where}.function' must be an object.", f"{where}.function")
    return check_function(function, tool, f"{where}.function")


def check_function(
    function: Mapping[str, Any], raw: dict[str, Any], where: str, member: str = "parameters"
) -> Function:
    """A function with its schema in `member`; `raw` is what a chat template is told of it. Raises BatonError."""
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"'{where}.name' must be up to 64 letters, digits, dots, dashes and underscores.", f"{where}.name"
        )
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise invalid(f"'{where}.description' must be a string.", f"{where}.description")
    if not isinstance(function.get("strict", False), (bool, type(None))):
        raise invalid(f"'{where}.strict' must be true or false.", f"{where}.strict")
    parameters = function.get(member)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    check_schema(parameters, f"{where}.{member}")
    if parameters.get("type", "object") != "object":
        raise invalid(f"'{where}.{member}' must be the schema of an object.", f"{where}.{member}")
    return Function(name, parameters, raw, where, member)


def chosen(choice: Any, functions: tuple[Function, ...], parallel: bool) -> Tools | None:
    """What `tool_choice`, in the shape of a chat's, makes of the functions. Raises BatonError(INVALID_REQUEST)."""
    param = "tool_choice"
    if choice in (None, "auto", "none"):
        return Tools(functions, choice or "auto", parallel) if functions else None
    if not functions:
        raise invalid(f"'{param}' needs 'tools'.", param)
    if choice == "required":
        return Tools(functions, "required", parallel)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(f"'{param}' must be none, auto, required, or name a function.", param)
    named = tuple(function for function in functions if function.name == name)
    if not named:
        raise invalid(f"'{param}' names '{name[:64]}', which is not in 'tools'.", param)
    return Tools(named, "named", parallel=False)
