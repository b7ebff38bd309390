"""Whether something has the shape of a JSON schema: keywords with values of the right types, all the way down.

For schemas that are shown to a model but not compiled: the compiler refuses also what is right and beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.frontend.errors import invalid

MAX_DEPTH = 64
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


def check_schema(value: Any, param: str) -> None:
    """Raises BatonError(INVALID_REQUEST, `param`) with the place and what is wrong there."""
    if not isinstance(value, dict):
        raise invalid(f"'{param}' must be an object.", param)
    wrong = _wrong(value, "", 0)
    if wrong:
        raise invalid(f"Invalid schema in '{param}': {wrong}.", param)


def _wrong(schema: Any, at: str, depth: int) -> str:
    """What is wrong in it or below; "" when nothing is."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict):
        return f"'{at or '#'}' must be an object"
    if depth > MAX_DEPTH:
        return f"it is nested more than {MAX_DEPTH} deep"
    for keyword, value in schema.items():
        where = f"{at}.{keyword}".lstrip(".")
        if keyword in _VALUES:
            holds, what = _VALUES[keyword]
            if not holds(value):
                return f"'{where}' must be {what}"
        for child, place in _children(keyword, value, where):
            if wrong := _wrong(child, place, depth + 1):
                return wrong
    return ""


def _children(keyword: str, value: Any, where: str) -> list[tuple[Any, str]]:
    if keyword in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
        return [(child, f"{where}.{name}") for name, child in value.items()]
    if keyword in ("allOf", "anyOf", "oneOf", "prefixItems") or (keyword == "items" and isinstance(value, list)):
        return [(child, f"{where}[{i}]") for i, child in enumerate(value)]
    if keyword in ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"):
        return [(value, where)]
    return []


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) and value else [value]
    return all(isinstance(name, str) and name in _TYPES for name in names)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(sorted(_TYPES))}, or a list of them"),
    "required": (_is_strings, "a list of strings"),
    **dict.fromkeys(
        ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), (_is_object, "an object")
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum"), (_is_list, "a list that is not empty")),
    **dict.fromkeys(("pattern", "format", "$ref", "description", "title"), (_is_string, "a string")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "an integer of at least 0"),
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (_is_number, "a number")
    ),
}
