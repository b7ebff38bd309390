"""Grammars as llguidance reads them. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton.engine.port import Grammar, GrammarKind

JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""One line of JSON with at most one space after a comma or colon. Where any whitespace may come, a model in doubt draws
blank lines until its budget is gone."""

MAX_GBNF_RULES = 512
MAX_GBNF_BYTES = 32 << 10
"""The converter is Python whose time grows with the square of either: this much is some tens of milliseconds."""
_LARK = re.compile(r"%llguidance\b|start\s*:")

ASCII_CLASSES = "dws"
"""`\\d`, `\\w` and `\\s` are ASCII, as most who write them mean."""


def source(grammar: Grammar) -> str:
    """The text that llguidance compiles. Raises ValueError with what is wrong, as far as it shows without compiling."""
    match grammar.kind:
        case GrammarKind.JSON:
            return json_schema(grammar.text)
        case GrammarKind.REGEX:
            return f"start: /{llguidance.regex_to_lark(grammar.text, ASCII_CLASSES)}/"
        case GrammarKind.CHOICE:
            return choice(json.loads(grammar.text))
        case GrammarKind.GRAMMAR:
            return lark(grammar.text)


def json_schema(text: str) -> str:
    """A schema with our whitespace, whatever it says of its own."""
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    return json.dumps({"grammars": [{"json_schema": with_options(schema)}]})


def with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as a rule of a Lark grammar may embed it (`%json`): with our whitespace."""
    return {**schema, "x-guidance": JSON_OPTIONS}


def choice(options: list[str]) -> str:
    """One of the strings."""
    if not options or not all(isinstance(option, str) and option for option in options):
        raise ValueError("a choice takes a list of strings that are not empty")
    return "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in dict.fromkeys(options))


def lark(text: str) -> str:
    """Lark stays as it is, GBNF becomes Lark."""
    if text.lstrip().startswith("{"):
        raise ValueError("a grammar must be in the syntax of Lark or GBNF")
    # Line by line: a search for this at the beginning of any line takes minutes of a text of empty ones.
    if any(_LARK.match(line.lstrip()) for line in text.splitlines()):
        return text
    if text.count("::=") > MAX_GBNF_RULES or len(text) > MAX_GBNF_BYTES:
        raise ValueError(f"in GBNF at most {MAX_GBNF_RULES} rules and {MAX_GBNF_BYTES} bytes are taken: use Lark")
    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises bare Exception, and IndexError at the end of a text
        raise ValueError(f"the grammar is neither Lark (without a rule 'start:') nor GBNF: {error}") from error
