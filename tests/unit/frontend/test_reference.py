"""`docs/api.md`, the OpenAPI description and what the parsers read are one and the same list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import BatonError
from services.frontend.anthropic.body import read_message
from services.frontend.app import create_app
from services.frontend.embeddings.body import parse_embeddings
from services.frontend.listing import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from services.frontend.metrics import FrontendMetrics
from services.frontend.openapi import describe
from services.frontend.reference import ENDPOINTS, FIELDS, fields, tables
from services.frontend.reference_native import DETOKENIZE, EMBEDDINGS, GENERATE, NATIVE_FIELDS, TOKENIZE
from services.frontend.reference_talks import TALK_FIELDS
from services.frontend.responses.body import read_response
from services.frontend.schema import parse_chat, parse_completion
from services.frontend.sglang.body import NOT_SAMPLING, SAMPLING, read_generate
from services.frontend.tokens.body import parse_detokenize, parse_tokenize

DOCS = Path(__file__).resolve().parents[3] / "docs" / "api.md"
HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": HI},
    COMPLETIONS: {"model": "m", "prompt": "p"},
    RESPONSES: {"model": "m", "input": "p"},
    MESSAGES: {"model": "m", "messages": HI, "max_tokens": 5},
    EMBEDDINGS: {"model": "m", "input": "p"},
    TOKENIZE: {"messages": HI},
    DETOKENIZE: {"tokens": [1]},
    GENERATE: {"text": "p"},
}
PARSERS: dict[str, Callable[[Any], Any]] = {
    CHAT: lambda body: parse_chat(body, 1000),
    COMPLETIONS: lambda body: parse_completion(body, 1000),
    RESPONSES: lambda body: read_response(body, 1000, None),
    MESSAGES: lambda body: read_message(body, 1000),
    EMBEDDINGS: lambda body: parse_embeddings(body, 1000, 8),
    TOKENIZE: parse_tokenize,
    DETOKENIZE: lambda body: parse_detokenize(body, 1000),
    GENERATE: lambda body: read_generate(body, 1000),
}


class Noted(dict[str, Any]):
    """A body that remembers which fields were looked at."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def parse(path: str, body: dict[str, Any]) -> Any:
    body.get("model")  # is read before what else there is
    return PARSERS[path](body)


def with_field(path: str, name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return GOOD[path] | {outer: {inner: value} if inner else value}


@pytest.mark.parametrize("path", GOOD)
def test_every_field_that_is_read_is_in_the_table_and_the_other_way(path: str) -> None:
    body = Noted(GOOD[path])
    parse(path, body)
    named = {field.name for field in fields(path) if field.status != "ignored"}
    assert body.read == {name for name in named if "." not in name}


def test_every_sampling_parameter_of_generate_is_in_the_table() -> None:
    status = {field.name.partition(".")[2]: field.status for field in fields(GENERATE) if "." in field.name}
    assert {name for name, one in status.items() if one == "works"} == set(SAMPLING)
    assert {name for name, one in status.items() if one == "refused"} == set(NOT_SAMPLING)


@pytest.mark.parametrize("path", GOOD)
def test_refused_fields_are_refused_and_ignored_ones_are_not(path: str) -> None:
    for field in fields(path):
        for value in ("x", ["x"], {"x": "y"}, True, 7):
            body = with_field(path, field.name, value)
            if field.status == "refused":
                with pytest.raises(BatonError) as caught:
                    parse(path, body)
                assert caught.value.param == field.name
            elif field.status == "ignored":
                assert parse(path, body) == parse(path, GOOD[path])
        if field.status == "refused":
            for value in (None, False, "", [], {}):
                assert parse(path, with_field(path, field.name, value)) == parse(path, GOOD[path])


def test_a_field_is_listed_once_for_each_endpoint() -> None:
    every = (*FIELDS, *TALK_FIELDS, *NATIVE_FIELDS)
    listed = [(field.name, path) for field in every for path in field.where]
    assert len(set(listed)) == len(listed)
    assert all((field.schema is not None) == (field.status == "works") for field in every)


def test_the_document_has_the_tables() -> None:
    text = DOCS.read_text(encoding="utf-8")
    begin, end = text.index("<!-- tables: begin"), text.index("<!-- tables: end")
    shown = text[begin:end].partition("-->\n")[2]
    assert shown == tables(), "run `python -m services.frontend.reference` and put its output into docs/api.md"


def test_every_route_is_described() -> None:
    frontend: Any = type("F", (), {"model": type("M", (), {"name": "m"}), "api_keys": None, "cors_origins": (),
                                   "requests": None, "responses": None,
                                   "metrics": FrontendMetrics(CollectorRegistry())})()  # fmt: skip
    routes = {
        (method, route.path.replace("{model:path}", "{model}"))
        for route in create_app(frontend).routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    described = {(m.upper(), path) for path, methods in describe("m", keys=False)["paths"].items() for m in methods}
    assert routes == described == {(one.method, one.path) for one in ENDPOINTS}
