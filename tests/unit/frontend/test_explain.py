"""`POST /v1/baton/explain`: a body is read as a request is, and the router's answer told; nothing starts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.v1 import registry_pb2, router_pb2, worker_pb2
from services.frontend.explain import told
from tests.unit.frontend.peers import ScriptedWorker, Stack, running
from tests.unit.frontend.test_failures import HI, says

pytestmark = pytest.mark.timeout(60)


async def ask(stack: Stack, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with httpx.AsyncClient(trust_env=False) as client:
        reply = await client.post(f"{stack.url}/v1/baton/explain", json={"model": stack.model.name, **fields})
    return reply.status_code, reply.json()


async def test_a_chat_and_a_completion_are_explained(model: Model) -> None:
    async with running(model, ScriptedWorker("a", says(model)), ScriptedWorker("b", says(model))) as stack:
        status, chat = await ask(stack, messages=HI, max_tokens=7)
        assert (status, chat["object"], chat["max_tokens"]) == (200, "baton.explanation", 7)
        assert chat["summary"] == "merged: streaming from a (MERGED_CHEAPEST)"
        first, second = chat["candidates"]
        assert list(first["terms_ms"].items()) == [("prefill", 20.0), ("queue", 1.5)]
        assert (first["chosen"], second["chosen"], second["worker"], second["total_ms"]) == (True, False, "b", 21.5)
        status, completion = await ask(stack, prompt="hi " * 100, echo=True, logprobs=1)
        assert (status, completion["max_tokens"]) == (200, 16)
        asked = stack.router.explained
        assert [one.prompt_tokens for one in asked] == [chat["prompt_tokens"], completion["prompt_tokens"]]
        assert (asked[0].merged_only, asked[1].merged_only) == (False, True)
        assert len(asked[1].packed_keys) == 16 * completion["blocks"] > 0
        assert not stack.router.requests, "nothing was routed"
        assert not stack.workers[0].attempts, "nothing was started"
        assert stack.frontend.gate.held == (0, 0)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"messages": "hi"}, 400, "messages"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "model": "gpt"}, 404, "model"),
    ],
)
async def test_what_could_not_run_is_refused_with_its_field(
    model: Model, fields: dict[str, Any], status: int, param: str
) -> None:
    async with running(model, ScriptedWorker("a", says(model))) as stack:
        found, body = await ask(stack, **fields)
        assert (found, body["error"]["param"]) == (status, param)
        assert not stack.router.explained
        assert stack.frontend.gate.held == (0, 0)


def test_what_a_store_has_is_told_with_its_tier() -> None:
    one = router_pb2.Candidate(mode=worker_pb2.MODE_MERGED, store="s", stored_tokens=96, store_tier="nvme")
    (found,) = told(router_pb2.RouteRequest(), router_pb2.ExplainReply(candidates=[one]))["candidates"]
    assert (found["store"], found["stored_tokens"], found["store_tier"]) == ("s", 96, "nvme")


def test_a_store_that_nothing_is_loaded_from_is_told_with_the_reason() -> None:
    out = router_pb2.StoreView(store=registry_pb2.KvStore(id="s"), why="quarantined: is silent")
    found = told(router_pb2.RouteRequest(), router_pb2.ExplainReply(excluded_stores=[out]))["excluded_stores"]
    assert found == [{"store": "s", "why": "quarantined: is silent"}]


async def test_a_refusal_is_an_explanation_and_no_router_is_an_error(model: Model) -> None:
    async with running(model, ScriptedWorker("a", says(model))) as stack:
        stack.router.refusal = BatonError(Reason.NO_CAPACITY, "all are full")
        status, body = await ask(stack, messages=HI)
        assert (status, body["summary"], body["candidates"]) == (200, "NO_CAPACITY: all are full", [])
        await stack.router.stop()
        status, body = await ask(stack, messages=HI)
        assert (status, body["error"]["code"]) == (503, "router_unavailable")
