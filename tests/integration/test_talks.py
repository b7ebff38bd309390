"""Responses and messages on real processes: a stream whose worker is killed says what an undisturbed one says.

A random model in f32, greedy, so that there is one right answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.integration.asking import plain_client
from tests.integration.stack import SERVED, Stack
from tests.message_stream import read_message_stream
from tests.response_stream import read_response_stream
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = 48
PROMPT = "The lighthouse keeper counted the ships that passed."
ASKED: dict[str, dict[str, Any]] = {
    "responses": {"input": PROMPT, "max_output_tokens": TOKENS},
    "messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS},
}
DELTAS = {"responses": b"response.output_text.delta", "messages": b"text_delta"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("talks")
    model = make_tiny_model(directory / "tiny", layers=12, hidden=256)
    flags: dict[str, Any] = {"kvstore": False, "pool_gib": 0.1, "chunk_tokens": 64}
    run = Stack(directory, model, prefill=0, decode=0, merged=2, **flags).start()
    yield run
    run.heal()
    run.teardown()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with plain_client() as client:
        yield client


async def stream(http: httpx.AsyncClient, stack: Stack, api: str, kill_after: int = 0) -> bytes:
    """The whole stream; once that many deltas have come, the worker that streams is killed."""
    body = {"model": SERVED, "stream": True, "temperature": 0, "ignore_eos": True, **ASKED[api]}
    raw, struck = b"", False
    async with http.stream("POST", f"{stack.url()}/v1/{api}", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        found = re.search(r"worker=([\w-]+)", reply.headers["x-baton-route"])
        assert found
        async for part in reply.aiter_bytes():
            raw += part
            if kill_after and not struck and raw.count(DELTAS[api]) >= kill_after:
                stack.kill(found[1])
                struck = True
    assert struck == bool(kill_after)
    return raw


@pytest.mark.parametrize("api", ASKED)
async def test_a_killed_worker_is_not_seen(stack: Stack, http: httpx.AsyncClient, api: str) -> None:
    stack.heal()
    stack.clear_caches()
    wanted = await stream(http, stack, api)
    stack.clear_caches()
    got = await stream(http, stack, api, kill_after=5)
    if api == "responses":
        one, other = read_response_stream(got), read_response_stream(wanted)
        assert one.faults == other.faults == []
        assert one.text == other.text
        assert one.response["status"] == other.response["status"] == "incomplete"
        assert one.response["usage"] == other.response["usage"]
        story = one.response["baton"]
        kept = await http.get(f"{stack.url()}/v1/responses/{one.response['id']}")
        assert kept.json() == one.response
    else:
        first, second = read_message_stream(got), read_message_stream(wanted)
        assert first.faults == second.faults == []
        assert first.text == second.text
        assert (first.reason, first.usage) == (second.reason, second.usage) == ("max_tokens", second.usage)
        last = got.rpartition(b"event: message_delta\ndata: ")[2].partition(b"\n")[0]
        story = json.loads(last)["baton"]
    assert story["attempts"] >= 2
    assert "RESUMED" in story["reasons"]
    stack.heal()
    stack.settle()


async def test_the_background_survives_a_kill_and_its_client(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.heal()
    body = {"model": SERVED, "temperature": 0, "ignore_eos": True, **ASKED["responses"]}
    wanted = (await http.post(f"{stack.url()}/v1/responses", json=body)).json()
    began = (await http.post(f"{stack.url()}/v1/responses", json=body | {"background": True})).json()
    assert began["status"] == "queued"
    path, raw, struck = f"{stack.url()}/v1/responses/{began['id']}", b"", False
    async with http.stream("GET", path, params={"stream": "true"}) as reply:
        async for part in reply.aiter_bytes():
            raw += part
            if not struck and raw.count(DELTAS["responses"]) >= 3:
                busy = [name for name in stack.findings() if name in stack.workers()]
                stack.kill(*busy)
                struck = True
    assert struck
    told = read_response_stream(raw, "queued")
    assert told.faults == []
    assert told.text == "".join(part["text"] for item in wanted["output"] for part in item["content"])
    assert (await http.get(path)).json() == told.response
    stack.heal()
    stack.settle()
