"""Whose fault a failure is: a client's is told to the client, an upstream's sends the request elsewhere."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from baton.engine.openai.failures import MAX_SAID, from_event, from_status
from baton.errors import Reason

TOO_LONG = [
    "This model's maximum context length is 2048 tokens. However, you requested 4000 tokens",
    "the request exceeds the available context size (512 tokens), try increasing it",
    "The input (5000 tokens) is longer than the model's context length (2048 tokens).",
    "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens",
    "The sum of prompt length (600) and query length exceed max_num_tokens (512)",
]


@pytest.mark.parametrize("said", TOO_LONG)
@pytest.mark.parametrize("status", [400, 422, 500])
def test_too_long_in_the_words_of_each_server(said: str, status: int) -> None:
    error = from_status(status, orjson.dumps({"error": {"message": said}}))
    assert (error.reason, error.reason.retryable) == (Reason.CONTEXT_LENGTH_EXCEEDED, False)


@pytest.mark.parametrize(
    ("status", "reason", "elsewhere"),
    [
        (400, Reason.INVALID_REQUEST, False),
        (422, Reason.INVALID_REQUEST, False),
        (401, Reason.DECODE_UNAVAILABLE, True),
        (403, Reason.DECODE_UNAVAILABLE, True),
        (404, Reason.DECODE_UNAVAILABLE, True),
        (413, Reason.REQUEST_TOO_LARGE, False),
        (429, Reason.NO_CAPACITY, True),
        (500, Reason.ENGINE_FAILED, True),
        (502, Reason.DECODE_UNAVAILABLE, True),
        (503, Reason.DECODE_UNAVAILABLE, True),
        (504, Reason.DECODE_UNAVAILABLE, True),
        (529, Reason.ENGINE_FAILED, True),
        (302, Reason.ENGINE_FAILED, True),
    ],
)
def test_statuses(status: int, reason: Reason, elsewhere: bool) -> None:
    error = from_status(status, b'{"error": {"message": "because", "param": "top_k"}}')
    assert (error.reason, error.reason.retryable) == (reason, elsewhere)
    assert "because" in error.message
    assert error.param == ("top_k" if status in (400, 422) else None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "nothing"),
        (b"<html>Bad Gateway", "Bad Gateway"),
        (b'{"detail": "no"}', "no"),
        (b'{"error": "no"}', "no"),
        (b'["no"]', "no"),
        (b"\xff" * 5000, "\ufffd"),
        (b'{"message": null}', "None"),
    ],
)
def test_any_body_gives_words(body: bytes, said: str) -> None:
    error = from_status(500, body)
    assert said in error.message
    assert len(error.message) < MAX_SAID + 100


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"message": "out of memory", "code": 500}, Reason.ENGINE_FAILED),
        ({"message": "slow down", "code": 429}, Reason.NO_CAPACITY),
        ({"message": "x", "code": "weird"}, Reason.ENGINE_FAILED),
        ({"message": TOO_LONG[0], "code": 400}, Reason.CONTEXT_LENGTH_EXCEEDED),
        ("just words", Reason.ENGINE_FAILED),
    ],
)
def test_errors_in_the_middle_of_a_stream(said: Any, reason: Reason) -> None:
    assert from_event(said).reason is reason
