"""What is too much for every worker that is here or may be back is an error; for one that is away, come again."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest
from google.protobuf import json_format

from baton.engine.needs import LOGPROBS
from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.registry.view import View
from baton.v1 import registry_pb2
from services.frontend.lately import AWAY_S, LONG_AWAY_S, Lately
from tests.unit.frontend.peers import HANG_S, ScriptedWorker, running
from tests.unit.frontend.test_api import says

pytestmark = pytest.mark.timeout(60)


def told(
    id: str,
    tokens: int,
    role: registry_pb2.Role.ValueType = registry_pb2.ROLE_DECODE,
    model: str = "m",
    lacks: Sequence[str] = (),
) -> bytes:
    worker = registry_pb2.Worker(id=id, role=role, model=model, max_context=tokens, lacks=lacks)
    return json_format.MessageToJson(worker).encode()


async def test_who_left_counts_for_a_while() -> None:
    now = 1000.0
    workers: View[registry_pb2.Worker] = View("workers", registry_pb2.Worker)
    lately = Lately(workers, lambda: now)
    assert lately.longest("m") == 0
    workers.change("small", told("small", 100))
    workers.change("large", told("large", 900))
    workers.change("prefill", told("prefill", 5000, registry_pb2.ROLE_PREFILL))
    workers.change("other", told("other", 5000, model="n"))
    assert lately.longest("m") == 900
    workers.change("large", None)
    now += AWAY_S - 1
    assert lately.longest("m") == 900
    now += 1
    assert lately.longest("m") == 100
    assert lately.longest("m", LONG_AWAY_S) == 900
    assert lately.longer("small", LONG_AWAY_S)
    assert not lately.longer("small")
    workers.change("large", told("large", 800))
    assert lately.longest("m") == 800
    workers.change("large", None)
    workers.change("large", told("large", 50))
    assert lately.longest("m") == 100, "it is back as another one"
    assert not lately.longer("small")
    assert lately.longer("large")
    assert lately.longer("never seen")
    await workers.close()


async def test_what_somebody_away_can_do() -> None:
    now = 1000.0
    workers: View[registry_pb2.Worker] = View("workers", registry_pb2.Worker)
    lately = Lately(workers, lambda: now)
    workers.change("up", told("up", 100, lacks=["logprobs", "embeddings"]))
    workers.change("torch", told("torch", 100))
    assert not lately.able("n", [])
    workers.change("torch", None)
    assert lately.able("m", ["logprobs"])
    now += AWAY_S
    assert not lately.able("m", ["logprobs"])
    assert lately.able("m", ["regex"])
    await workers.close()


async def test_what_only_somebody_away_could_take_is_told_to_come_again(model: Model) -> None:
    small, large = ScriptedWorker("small", says(model)), ScriptedWorker("large", says(model))
    small.max_context, large.max_context = 64, 1024
    async with running(model, small, large) as stack:
        stack.router.refusal = BatonError(Reason.CONTEXT_LENGTH_EXCEEDED, "small takes 64 tokens")
        async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False) as client:
            for n, status in ((500, 503), (2000, 400)):
                body = {"model": model.name, "prompt": [5] * n, "max_tokens": 4}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == status, answer.text
                assert ("retry-after" in answer.headers) == (status == 503)


async def test_what_only_somebody_away_could_do_is_told_to_come_again(model: Model) -> None:
    upstream, torch = ScriptedWorker("up", says(model)), ScriptedWorker("torch", says(model))
    upstream.lacks = [LOGPROBS]
    async with running(model, upstream, torch) as stack:
        stack.router.refusal = BatonError(Reason.INVALID_REQUEST, "LACKS: up cannot do logprobs")
        async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False) as client:
            for gone, status in ((False, 503), (True, 400)):
                if gone:
                    stack.worker_view.change("torch", None)
                    stack.client.lately._left.clear()
                body = {"model": model.name, "prompt": "a", "logprobs": 1, "max_tokens": 4}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == status, answer.text
