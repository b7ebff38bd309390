"""How often a line is tried, and what counts."""

from __future__ import annotations

import json
import time

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, Reason
from services.frontend.batches import answer as answer_module
from services.frontend.batches.answer import EMBEDDINGS, TRIES, Answerer
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.batches.usage import Usage
from services.frontend.embeddings.body import Inputs
from services.frontend.respond import Prepared


class Scripted:
    """Reads a body after so many errors, and makes its embedding."""

    def __init__(self, *errors: Reason) -> None:
        self.errors = list(errors)
        self.answerer = Answerer(self.prepare, self.read, self.embed, BatchMetrics(CollectorRegistry()))

    async def prepare(self, endpoint: str, body: bytes, uid: str, tenant: str, timeout_s: float) -> Prepared:
        raise AssertionError

    async def read(self, body: bytes) -> Inputs:
        if self.errors:
            raise BatonError(self.errors.pop(), "not now")
        return Inputs([[1, 2, 3]], b"")

    async def embed(self, inputs: Inputs, uid: str, timeout_s: float) -> bytes:
        return b"{}"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "WAIT_S", (0.001, 0.002))


async def test_a_line_that_finds_no_place_is_tried_until_it_does() -> None:
    answer = await Scripted(*[Reason.NO_CAPACITY] * 3 * TRIES).answerer.answer(
        "a", EMBEDDINGS, b"{}", "", time.time() + 60
    )
    assert (answer.ok, answer.outcome, answer.usage) == (True, "ok", Usage(3))


async def test_as_long_as_it_has_time() -> None:
    answer = await Scripted(*[Reason.NO_CAPACITY] * 3 * TRIES).answerer.answer("a", EMBEDDINGS, b"{}", "", time.time())
    assert (answer.ok, answer.outcome) == (False, "no_capacity")
    assert json.loads(answer.line)["response"]["status_code"] == 429


async def test_what_fails_again_and_again_ends() -> None:
    scripted = Scripted(*[Reason.ENGINE_FAILED] * 3 * TRIES)
    answer = await scripted.answerer.answer("a", EMBEDDINGS, b"{}", "", time.time() + 60)
    assert (answer.ok, answer.outcome, len(scripted.errors)) == (False, "engine_failed", 2 * TRIES)


async def test_what_is_wrong_is_tried_once() -> None:
    scripted = Scripted(Reason.NO_CAPACITY, Reason.INVALID_REQUEST)
    answer = await scripted.answerer.answer("a", EMBEDDINGS, b"{}", "", time.time() + 60)
    assert (answer.ok, answer.outcome, len(scripted.errors)) == (False, "invalid_request", 1)
