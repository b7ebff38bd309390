"""Random JSON schemas whose smallest value is short: an object, an array, what is in them, references and unions."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("a", "name", "été", "with space", 'quo"te', "back\\slash", "日本", "🙂", "x_1", "__proto__")


def schemas(count: int, seed: int = 7) -> list[dict[str, Any]]:
    """The same ones for the same arguments."""
    draw = random.Random(seed)
    return [_shared(draw) if draw.random() < 0.15 else _object(draw, 0) for _ in range(count)]


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_string, _string, _number, _integer, _enum, _constant, _pattern, _nothing)
    branches = (_object, _array, _union)
    return draw.choice(leaves if depth > 2 or draw.random() < 0.6 else branches)(draw, depth + 1)


def _string(draw: random.Random, _: int) -> dict[str, Any]:
    least = draw.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(8)}


def _number(draw: random.Random, _: int) -> dict[str, Any]:
    low = draw.randrange(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + draw.randrange(1, 90)}


def _integer(draw: random.Random, _: int) -> dict[str, Any]:
    low = draw.randrange(-1000, 1000)
    return {"type": "integer", "minimum": low, "exclusiveMaximum": low + draw.randrange(1, 2000)}


def _enum(draw: random.Random, _: int) -> dict[str, Any]:
    return {"enum": draw.sample([*WORDS, 1, -2.5, None, True, [1, "b"], {"k": 0}], draw.randrange(1, 6))}


def _constant(draw: random.Random, _: int) -> dict[str, Any]:
    return {"const": draw.choice([*WORDS, 0, None, False])}


def _pattern(draw: random.Random, _: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [{"pattern": r"^[a-f]{2,6}$"}, {"pattern": r"^\d{3}-\d{2}$"}, {"format": "date"}]
    return {"type": "string", **draw.choice(kinds)}


def _nothing(draw: random.Random, _: int) -> dict[str, Any]:
    return {"type": draw.choice(["null", "boolean", ["null", "boolean"]])}


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randrange(3)
    found = {"type": "array", "minItems": least, "maxItems": least + draw.randrange(3)}
    if draw.random() < 0.2:
        return found | {"prefixItems": [_any(draw, depth) for _ in range(2)], "items": _integer(draw, depth)}
    return found | {"items": _any(draw, depth)}


def _union(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(draw, depth) for _ in range(draw.randrange(1, 4))]}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randrange(1, 5))
    required = [name for name in names if draw.random() < 0.7]
    properties = {name: _any(draw, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _shared(draw: random.Random) -> dict[str, Any]:
    """One that refers to a part of itself, in a circle that may end."""
    leaf = _any(draw, 2)
    node = {
        "type": "object",
        "properties": {"value": leaf, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"leaf": leaf, "node": node}, "$ref": "#/$defs/node"}
