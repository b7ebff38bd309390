"""The edges of what may be asked: a full context, one token more, and a single token of output."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from baton.v1 import worker_pb2 as pb
from tests.faults.conftest import CONTEXT, Fleet, Oracle
from tests.faults.fleet import LOCAL, MERGED, handed_over, prompt, real_run
from tests.integration.asking import plain_client
from tests.integration.stack import SERVED
from tests.scripted_prefill import run_request
from tests.worker_process import frontend

pytestmark = pytest.mark.integration

ENDPOINTS = ["completions", "chat/completions"]
FRONTENDS = ["frontend", "strict"]


@dataclass
class Whole:
    """A reply, streamed or not, in one form. `ends` are the finish reasons by choice."""

    status: int
    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)


async def post(client: httpx.AsyncClient, fleet: Fleet, where: str, endpoint: str, **asked: Any) -> Whole:
    """One request, greedy and deaf to end-of-text."""
    base: dict[str, Any] = {"model": SERVED, "temperature": 0, "ignore_eos": True, **asked}
    if base.get("stream"):
        base["stream_options"] = {"include_usage": True}
    reply = await client.post(f"{fleet.stack.url(where)}/v1/{endpoint}", json=base)
    if reply.status_code != 200:
        return Whole(reply.status_code, error=reply.json()["error"])
    if base.get("stream"):
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
    else:
        chunks = [reply.json()]
    whole = Whole(200)
    for chunk in chunks:
        whole.usage = chunk.get("usage") or whole.usage
        for choice in chunk["choices"]:
            said = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            whole.text[choice["index"]] = whole.text.get(choice["index"], "") + said
            if choice["finish_reason"]:
                whole.ends.setdefault(choice["index"], []).append(choice["finish_reason"])
    return whole


def content(endpoint: str, tokens: int) -> dict[str, Any]:
    """A prompt of exactly `tokens` tokens: a byte is a token, and the chat template adds 19 of them."""
    text = "the quick brown fox jumps over the lazy dog; " * (CONTEXT // 40)
    if endpoint == "completions":
        return {"prompt": text[:tokens]}
    around = len("user: \nassistant: ")
    return {"messages": [{"role": "user", "content": text[: tokens - around]}]}


@pytest.mark.parametrize("where", FRONTENDS)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_context_limit(fleet: Fleet, where: str, endpoint: str, stream: bool) -> None:
    """What fits is answered to the last token, what does not is refused before anything starts."""
    texts = set()
    async with plain_client() as client:
        for tokens, wish, output in [
            (CONTEXT - 1, None, 1),
            (CONTEXT - 1, 1, 1),
            (CONTEXT - 8, 8, 8),
            (CONTEXT - 8, None, 8),
        ]:
            more = {} if wish is None else {"max_tokens": wish}
            got = await post(client, fleet, where, endpoint, **content(endpoint, tokens), stream=stream, **more)
            assert got.status == 200, (tokens, wish, got)
            assert got.ends == {0: ["length"]}
            assert got.usage["prompt_tokens"] == tokens
            assert got.usage["completion_tokens"] == output
            texts.add((tokens, got.text[0]))
        assert len(texts) == 2, "the same prompt had two answers"
        for tokens, wish in [(CONTEXT, None), (CONTEXT, 1), (CONTEXT + 1, None), (CONTEXT - 1, 2), (CONTEXT - 8, 9)]:
            more = {} if wish is None else {"max_tokens": wish}
            got = await post(client, fleet, where, endpoint, **content(endpoint, tokens), stream=stream, **more)
            assert (got.status, got.error.get("code")) == (400, "context_length_exceeded"), (tokens, wish, got)
            assert str(CONTEXT) in got.error["message"]


async def test_context_limit_of_workers(fleet: Fleet, greedy: Oracle) -> None:
    """The same where a frontend that checks nothing asks: full is served, one more is refused with nothing held."""
    full, over = prompt(CONTEXT - 1, "full"), prompt(CONTEXT, "over")
    async with frontend(fleet.decode) as decode, frontend(fleet.merged) as merged:
        for client, plan in ((decode, handed_over(fleet.prefill)), (decode, LOCAL), (merged, MERGED)):
            uid = f"full-{plan.mode}"
            result = await client.run(uid, full, plan, max_tokens=5, fallback=pb.FALLBACK_STRICT)
            assert result.tokens == {0: greedy(full, 1)}
            assert result.finish == {0: "length"}
            refused = await client.submit(client.attempt(f"over-{plan.mode}", over), plan)
            assert refused.failure.reason == "CONTEXT_LENGTH_EXCEEDED"
        request = run_request(decode.attempt("over-run", over), decode.described)
    async with real_run(fleet.prefill, request) as events:
        assert [event.failure.reason async for event in events] == ["CONTEXT_LENGTH_EXCEEDED"]


@pytest.mark.parametrize("where", FRONTENDS)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("n", [1, 3])
async def test_one_token(fleet: Fleet, where: str, endpoint: str, stream: bool, n: int) -> None:
    """Exactly one token and one end for each choice."""
    async with plain_client() as client:
        asked = content(endpoint, 100 + n)
        got = await post(client, fleet, where, endpoint, **asked, stream=stream, n=n, max_tokens=1)
        more = await post(client, fleet, where, endpoint, **asked, max_tokens=4)
    assert got.status == 200, got
    assert got.ends == {i: ["length"] for i in range(n)}
    assert got.usage["completion_tokens"] == n
    assert all(more.text[0].startswith(text.rstrip("\ufffd")) for text in got.text.values())


async def test_one_token_of_workers(fleet: Fleet, greedy: Oracle) -> None:
    """Handed over, local and merged: one token, one end, and nothing held for a second."""
    async with frontend(fleet.decode) as decode, frontend(fleet.merged) as merged:
        for client, plan in ((decode, handed_over(fleet.prefill)), (decode, LOCAL), (merged, MERGED)):
            for tokens in (1, 32, 200):
                ids, uid = prompt(tokens, "one", plan.mode), f"one-{tokens}-{plan.mode}"
                result = await client.run(uid, ids, plan, max_tokens=1, fallback=pb.FALLBACK_STRICT)
                assert result.tokens == {0: greedy(ids, 1)}
                assert (result.finish, result.events) == ({0: "length"}, 1)
