"""Rules for the grammars of calls: JSON by the schema of each function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from baton.grammar.source import with_options
from services.frontend.parsers.events import MAX_CALLS, Signature, TokenId


def one_of(functions: Sequence[Signature], key: str) -> str:
    """The rule `one`: a JSON object with `name` and, under `key`, the arguments, of any of the functions."""
    rules = [f"one: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    for i, (name, parameters) in enumerate(functions):
        schema = {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": "#/$defs/arguments"}},
            "required": ["name", key],
            "additionalProperties": False,
            "$defs": {"arguments": rebased(arguments(parameters), "#/$defs/arguments")},
        }
        rules.append(f"call_{i}: {embedded(schema)}")
    return "\n".join(rules) + "\n"


def arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has no other members than it names, where it does not say otherwise."""
    says = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")
    closed = not parameters.keys().isdisjoint(says)
    extra = {} if closed else {"additionalProperties": False}
    return {"type": "object", **parameters, **extra}


def embedded(schema: dict[str, Any]) -> str:
    """A rule body."""
    return f"%json {json.dumps(with_options(schema))}"


def rebased(value: Any, root: str) -> Any:
    """A schema whose references to itself hold where it is a part, at `root`, of another one."""
    if isinstance(value, list):
        return [rebased(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: root + item[1:]
        if key == "$ref" and isinstance(item, str) and item.startswith("#")
        else rebased(item, root)
        for key, item in value.items()
    }


def repeated(rule: str, separator: str, parallel: bool) -> str:
    """A rule body: `rule` once, or up to MAX_CALLS times with `separator` between."""
    return f"{rule} ({json.dumps(separator)} {rule}){{0,{MAX_CALLS - 1}}}" if parallel else rule


def mark(text: str, token_id: TokenId) -> str:
    """A mark in a rule: its token, else its characters."""
    found = token_id(text)
    return json.dumps(text) if found is None else f"<[{found}]>"
