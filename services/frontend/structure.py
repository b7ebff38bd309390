"""Structured output as clients ask for it: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.engine.port import Grammar, GrammarKind
from services.frontend.errors import invalid

ANY_OBJECT = Grammar(GrammarKind.JSON, '{"type":"object"}')
_KINDS = {
    "json": GrammarKind.JSON,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
}
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Structure:
    """What an answer must look like, and the field that said so."""

    grammar: Grammar
    param: str


def read_structure(raw: Mapping[str, Any]) -> Structure | None:
    """What a body asks for; None: any text. Raises BatonError(INVALID_REQUEST) with the field at fault, two at once
    included. Whether a grammar compiles is seen later."""
    found = [
        one for one in (_response_format(raw.get("response_format")), _extras(raw), *_guided(raw)) if one is not None
    ]
    if len(found) > 1:
        raise invalid(f"'{found[0].param}' and '{found[1].param}' exclude each other.", found[1].param)
    return found[0] if found else None


def _response_format(value: Any) -> Structure | None:
    param = "response_format"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid(f"'{param}' must be an object.", param)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure(ANY_OBJECT, param)
    if kind != "json_schema":
        raise invalid(f"'{param}.type' must be text, json_object or json_schema.", f"{param}.type")
    named = value.get("json_schema")
    if not isinstance(named, dict):
        raise invalid(f"'{param}.json_schema' must be an object.", f"{param}.json_schema")
    name = named.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(
            f"'{param}.json_schema.name' must be up to 64 letters, digits, dashes and underscores.",
            f"{param}.json_schema.name",
        )
    if named.get("strict") is not None and not isinstance(named["strict"], bool):
        raise invalid(f"'{param}.json_schema.strict' must be true or false.", f"{param}.json_schema.strict")
    schema = named.get("schema")
    if not isinstance(schema, dict):
        raise invalid(f"'{param}.json_schema.schema' must be an object.", f"{param}.json_schema.schema")
    return Structure(Grammar(GrammarKind.JSON, json.dumps(schema)), param)


def _extras(raw: Mapping[str, Any]) -> Structure | None:
    param = "structured_outputs"
    value = raw.get(param)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid(f"'{param}' must be an object.", param)
    found = [
        _structure(name, given, f"{param}.{name}")
        for name, given in value.items()
        if name in _KINDS and given is not None
    ]
    if value.get("json_object"):
        found.append(Structure(ANY_OBJECT, f"{param}.json_object"))
    if len(found) != 1:
        raise invalid(f"'{param}' takes one of {', '.join(_KINDS)} and json_object.", param)
    return found[0]


def _guided(raw: Mapping[str, Any]) -> list[Structure]:
    """The older names of the same."""
    return [
        _structure(name, raw[f"guided_{name}"], f"guided_{name}")
        for name in _KINDS
        if raw.get(f"guided_{name}") is not None
    ]


def _structure(name: str, value: Any, param: str) -> Structure:
    kind = _KINDS[name]
    if kind is GrammarKind.CHOICE:
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise invalid(f"'{param}' must be a list of strings that are not empty.", param)
        return Structure(Grammar(kind, json.dumps(value)), param)
    if kind is GrammarKind.JSON:
        if not isinstance(value, (dict, str)):
            raise invalid(f"'{param}' must be a schema, or the text of one.", param)
        return Structure(Grammar(kind, value if isinstance(value, str) else json.dumps(value)), param)
    if not isinstance(value, str) or not value:
        raise invalid(f"'{param}' must be a string.", param)
    return Structure(Grammar(kind, value), param)
