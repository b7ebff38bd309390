"""What a batch's input may have, and what is told of one that has more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.frontend.batches import lines as lines_module
from services.frontend.batches.answer import COMPLETIONS, EMBEDDINGS
from services.frontend.batches.lines import check_lines
from services.frontend.batches.usage import Usage, read_usage


def line(n: int, body: Any, url: str = EMBEDDINGS) -> bytes:
    return json.dumps({"custom_id": str(n), "method": "POST", "url": url, "body": body}).encode() + b"\n"


def told(lines: list[bytes], endpoint: str = EMBEDDINGS) -> list[tuple[str, int | None, str | None]]:
    return [(error.code, error.line, error.param) for error in check_lines(lines, endpoint)[1]]


def test_so_many_inputs_are_embedded_in_all() -> None:
    full = [line(n, {"input": ["a"] * 2000}) for n in range(25)]
    assert told(full) == []
    assert told([*full, line(25, {"input": "b"})]) == [("too_many_inputs", 26, "body.input")]


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ({"input": "one"}, 1),
        ({"input": ["one", "two"]}, 2),
        ({"input": [1, 2, 3]}, 1),
        ({"input": [[1, 2], [3], [4]]}, 3),
        ({"input": [" 1", " 2"]}, 2),
        ({"input": []}, 1),
        ({"input": None}, 1),
        ({"input": {"a": [1, 2]}}, 1),
        ({}, 1),
    ],
)
def test_what_an_input_is(monkeypatch: pytest.MonkeyPatch, body: Any, inputs: int) -> None:
    monkeypatch.setattr(lines_module, "MAX_INPUTS", inputs)
    assert told([line(0, body)]) == []
    monkeypatch.setattr(lines_module, "MAX_INPUTS", inputs - 1)
    assert told([line(0, body)]) == [("too_many_inputs", 1, "body.input")]


def test_inputs_of_others_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_INPUTS", 1)
    assert told([line(n, {"prompt": "x", "input": ["a", "b"]}, COMPLETIONS) for n in range(3)], COMPLETIONS) == []


def test_usage_is_read_of_every_kind_of_answer() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": None}
    chat = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, **details}}
    assert read_usage(json.dumps(chat).encode()) == Usage(2, 3, 1)
    of_response = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0}}
    of_response |= {"output_tokens": 9, "output_tokens_details": {"reasoning_tokens": 6}, "total_tokens": 16}
    assert read_usage(json.dumps({"usage": of_response}).encode()) == Usage(7, 9, 4, 6)
    assert read_usage(b'{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}') == Usage(8)
    assert read_usage(b'{"error":{"message":"no"}}') == Usage()
