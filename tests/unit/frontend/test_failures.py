"""What breaks behind the frontend, and how a stream goes on: every token once, in order."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest

from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.v1 import registry_pb2, worker_pb2
from tests.unit.frontend.peers import HANG_S, Attempt, Script, ScriptedRouter, ScriptedWorker, Stack, running, until

EOS = 2
HI: list[Any] = [{"role": "user", "content": "hi"}]
TEXT = "Hello 😀 wörld, this is a test of streams that go on."

pytestmark = pytest.mark.timeout(60)


def ids_of(model: Model) -> list[int]:
    return [*model.tokenizer.encode(TEXT, add_special=False), EOS]


def says(model: Model) -> Script:
    async def script(attempt: Attempt) -> None:
        for choice in attempt.message.choices:
            await attempt.play(ids_of(model), choice=choice)

    return script


def client(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0, timeout=HANG_S)


async def stream_text(stack: Stack, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The whole text of a streamed chat, and its `baton` story."""
    stream = await client(stack).chat.completions.create(model=stack.model.name, messages=HI, stream=True, **fields)
    text, story = "", {}
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        story = (chunk.model_extra or {}).get("baton", story)
    return text, story


async def post(stack: Stack, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A chat request on a connection that the test reads, or does not. The kernel takes little for it: where sockets
    may have 32 MB, a whole answer would go there, read or not."""
    body = json.dumps({"model": stack.model.name, "messages": HI} | fields).encode()
    host, _, port = stack.url.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client, limit=1)
    lines = ("POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json")
    head = "\r\n".join((*lines, f"content-length: {len(body)}", "", ""))
    writer.write(head.encode() + body)
    return reader, writer


async def test_a_lost_session_resumes_with_what_the_client_has(model: Model) -> None:
    ids = ids_of(model)

    async def dies(attempt: Attempt) -> None:
        for offset in range(5):
            await attempt.tokens([ids[offset]], offset=offset)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    first, second = ScriptedWorker("a", dies), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        text, story = await stream_text(stack, seed=3, max_tokens=77)
        await until(lambda: len(stack.router.outcomes) == 3)
        outcomes = {o.attempt: o for o in stack.router.outcomes if o.uid}
        (lost,) = (o for o in stack.router.outcomes if not o.uid)
    assert text == TEXT
    assert (story["attempts"], story["worker"]) == (2, "b")
    assert story["reasons"] == ["MERGED_CHEAPEST", "RESUMED"]
    resumed = second.attempts[0].message
    assert list(resumed.emitted_ids) == ids[:5]
    assert (first.attempts[0].message.attempt, resumed.attempt) == (0, 1)
    assert resumed.sampling == first.attempts[0].message.sampling
    assert resumed.deadline == first.attempts[0].message.deadline
    assert list(stack.router.requests[1].exclude) == ["a"]
    assert (outcomes[0].reason, list(lost.failed_workers)) == ("SESSION_LOST", ["a"])
    assert stack.count("sessions_lost", worker="a", why="ended") == 1
    assert (outcomes[1].reason, outcomes[1].output_tokens) == ("", len(ids) - 5)
    assert stack.count("resumes", reason="SESSION_LOST") == 1
    assert stack.count("fallbacks", reason="RESUMED") == 1


async def test_the_only_worker_comes_back_and_the_stream_goes_on(model: Model) -> None:
    ids = ids_of(model)

    async def dies_once(attempt: Attempt) -> None:
        if attempt.message.emitted_ids:
            await attempt.play(ids)
            return
        await attempt.tokens(ids[:7], offset=0)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    async with running(model, ScriptedWorker("only", dies_once)) as stack:
        text, story = await stream_text(stack)
    assert text == TEXT
    assert story["attempts"] >= 2


async def test_several_choices_are_resumed_each_on_its_own(model: Model) -> None:
    ids = ids_of(model)

    async def dies(attempt: Attempt) -> None:
        await attempt.tokens(ids[:3], offset=0, choice=0)
        await attempt.tokens(ids[:4], offset=0, choice=1)
        await attempt.play(ids, choice=3)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    first, second = ScriptedWorker("a", dies), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        answer = await client(stack).chat.completions.create(model=model.name, messages=HI, n=5)
    assert [c.message.content for c in answer.choices] == [TEXT] * 5
    legs = sorted((tuple(a.message.choices), len(a.message.emitted_ids)) for a in second.attempts)
    assert legs == [((0,), 3), ((1,), 4), ((2, 4), 0)]
    assert len({a.message.attempt for a in second.attempts}) == 3


async def test_doubled_late_and_strange_events_are_dropped(model: Model) -> None:
    ids = ids_of(model)
    old: list[Attempt] = []

    async def dies(attempt: Attempt) -> None:
        old.append(attempt)
        await attempt.tokens(ids[:4], offset=0)
        await attempt.tokens(ids[:4], offset=0)
        await attempt.send(attempt.event(failure=worker_pb2.Event(failure={"reason": "ENGINE_FAILED"}).failure))

    async def goes_on(attempt: Attempt) -> None:
        # The stopped worker wakes up and says more of its old attempt.
        await old[0].tokens(ids[4:9], offset=4)
        await attempt.tokens(ids[2:4], offset=2)
        await attempt.tokens(ids[4:6], offset=4)
        await attempt.tokens(ids[4:6], offset=4)
        await attempt.tokens([5], offset=0, choice=7)
        other = worker_pb2.Event(uid="nobody", attempt=1, tokens=worker_pb2.Tokens(ids=[1]))
        await attempt.send(other)
        await attempt.tokens(ids[6:], offset=6, finish="stop")
        await attempt.tokens([5], offset=len(ids))

    first, second = ScriptedWorker("a", dies), ScriptedWorker("b", goes_on)
    async with running(model, first, second) as stack:
        text, _ = await stream_text(stack)
        await until(lambda: sum(stack.count("dropped_events", why=w) for w in ("unknown", "doubled", "stale")) >= 6)
    assert text == TEXT
    assert stack.count("dropped_events", why="doubled") == 3


async def test_a_gap_is_a_failure_and_nothing_is_skipped(model: Model) -> None:
    ids = ids_of(model)

    async def gaps(attempt: Attempt) -> None:
        await attempt.tokens(ids[:2], offset=0)
        await attempt.tokens(ids[5:], offset=5, finish="stop")

    first, second = ScriptedWorker("a", gaps), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        text, _ = await stream_text(stack)
        async with asyncio.timeout(HANG_S):
            await first.attempts[0].aborted.wait()
    assert text == TEXT
    assert stack.count("dropped_events", why="gap") == 1


async def test_the_end_is_known_although_its_news_was_lost(model: Model) -> None:
    ids = ids_of(model)

    async def all_but_the_end(attempt: Attempt) -> None:
        await attempt.tokens(ids, offset=0)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    worker = ScriptedWorker("a", all_but_the_end)
    async with running(model, worker) as stack:
        answer = await client(stack).chat.completions.create(model=model.name, messages=HI)
        assert answer.choices[0].finish_reason == "stop"
        short = await client(stack).chat.completions.create(model=model.name, messages=HI, max_tokens=len(ids))
        assert short.choices[0].message.content == TEXT
    # Whether the second request is refused once, for the session that is still down, is a matter of luck.
    assert len(worker.attempts) == 2


async def test_a_handback_routes_again_without_the_prefill(model: Model) -> None:
    async def hands_back(attempt: Attempt) -> None:
        if attempt.submit.plan.mode == worker_pb2.MODE_DISAGGREGATED:
            await attempt.send(attempt.event(handback=worker_pb2.Handback(reason="PREFILL_UNAVAILABLE")))
        else:
            await attempt.play(ids_of(model))

    decode = ScriptedWorker("d", hands_back, role=registry_pb2.ROLE_DECODE)
    async with running(model, decode) as stack:
        stack.router.prefill = "p"
        raw = await client(stack).chat.completions.with_raw_response.create(model=model.name, messages=HI)
    assert raw.parse().choices[0].message.content == TEXT
    assert raw.headers["x-baton-route"] == "local; decode=d; reasons=LOCAL_FALLBACK"
    assert list(stack.router.requests[1].exclude) == ["p"]
    story = (raw.parse().model_extra or {})["baton"]
    assert story["reasons"] == ["DISAGGREGATED", "HANDBACK", "LOCAL_FALLBACK"]
    assert stack.count("fallbacks", reason="HANDBACK") == 1


async def test_strict_answers_the_error_instead(model: Model) -> None:
    async def hands_back(attempt: Attempt) -> None:
        await attempt.send(attempt.event(handback=worker_pb2.Handback(reason="KV_TRANSFER_FAILED")))

    decode = ScriptedWorker("d", hands_back, role=registry_pb2.ROLE_DECODE)
    async with running(model, decode, strict=True) as stack:
        stack.router.prefill = "p"
        with pytest.raises(openai.InternalServerError) as caught:
            await client(stack).chat.completions.create(model=model.name, messages=HI, stream=True)
        assert len(decode.attempts) == 1
        assert decode.attempts[0].submit.fallback == worker_pb2.FALLBACK_STRICT
    assert caught.value.code == "kv_transfer_failed"
    assert caught.value.status_code == 503


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_worker_that_drains_gives_back_and_strict_goes_elsewhere_too(model: Model, tokens: int) -> None:
    """Another pair that runs as planned is no other way to run."""

    async def hands_back(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:tokens], offset=0)
        await attempt.send(attempt.event(handback=worker_pb2.Handback(reason="DRAINING")))

    first = ScriptedWorker("a", hands_back, role=registry_pb2.ROLE_DECODE)
    second = ScriptedWorker("b", says(model), role=registry_pb2.ROLE_DECODE)
    async with running(model, first, second, strict=True) as stack:
        stack.router.prefill = "p"
        text, story = await stream_text(stack)
        assert (text, story["worker"], story["attempts"]) == (TEXT, "b", 2)
        assert (stack.router.requests[-1].exclude, second.attempts[0].submit.plan.prefill.id) == (["a"], "p")


async def test_a_refusal_at_submit_goes_elsewhere_and_is_told_when_nobody_is_left(model: Model) -> None:
    first, second = ScriptedWorker("a", says(model)), ScriptedWorker("b", says(model))
    first.refusal = BatonError(Reason.NO_CAPACITY, "full")
    async with running(model, first, second) as stack:
        text, story = await stream_text(stack)
        assert (text, story["worker"], story["attempts"]) == (TEXT, "b", 2)
        assert "REROUTED" in story["reasons"]
        second.refusal = first.refusal
        with pytest.raises(openai.RateLimitError):
            await stream_text(stack)
        second.refusal = BatonError(Reason.CONTEXT_LENGTH_EXCEEDED, "too long for this pool")
        with pytest.raises(openai.BadRequestError):
            await stream_text(stack)


async def test_a_failure_that_nobody_can_mend_ends_the_stream_with_one_error(model: Model) -> None:
    async def fails(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:3], offset=0)
        failure = worker_pb2.Event(failure={"reason": "INTERNAL", "message": "bug"}).failure
        await attempt.send(attempt.event(failure=failure))

    async with running(model, ScriptedWorker("a", fails)) as stack:
        async with httpx.AsyncClient(timeout=HANG_S) as http:
            body = {"model": model.name, "messages": HI, "stream": True}
            response = await http.post(f"{stack.url}/v1/chat/completions", json=body)
        assert response.status_code == 200
        last = response.text.split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert "[DONE]" not in response.text
    assert stack.count("requests", endpoint="chat/completions", outcome="internal") == 1


async def test_the_deadline_ends_a_request_whole_and_streamed(model: Model) -> None:
    async def stalls(attempt: Attempt) -> None:
        if attempt.message.sampling.seed == 1:
            await attempt.tokens(ids_of(model)[:2], offset=0)

    worker = ScriptedWorker("a", stalls)
    async with running(model, worker, request_timeout_s=0.5) as stack:
        with pytest.raises(openai.InternalServerError) as caught:
            await client(stack).chat.completions.create(model=model.name, messages=HI, seed=2)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match="longer"):
            await stream_text(stack, seed=1)
        async with asyncio.timeout(HANG_S):
            for attempt in worker.attempts:
                await attempt.aborted.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_client_that_goes_away_aborts_its_attempt(model: Model, stream: bool, tokens: int) -> None:
    async def stalls(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:tokens], offset=0)

    worker = ScriptedWorker("a", stalls)
    async with running(model, worker) as stack:
        reader, writer = await post(stack, stream=stream)
        await until(lambda: bool(worker.attempts))
        if stream and tokens:
            assert await reader.read(12) == b"HTTP/1.1 200"
        writer.transport.abort()
        async with asyncio.timeout(HANG_S):
            await worker.attempts[0].aborted.wait()
        await until(lambda: stack.count("disconnects") == 1)


async def test_a_client_that_does_not_read_is_cut_off(model: Model) -> None:
    word = ids_of(model)[0]
    best = worker_pb2.Logprob(token_id=word, logprob=-1.0, top_ids=[word] * 20, top_logprobs=[-1.0] * 20)
    tokens = worker_pb2.Tokens(ids=[word] * 32, logprobs=[best] * 32)

    async def floods(attempt: Attempt) -> None:
        for offset in range(0, 8000, 32):
            await attempt.send(attempt.event(offset=offset, tokens=tokens))
            await asyncio.sleep(0)

    worker = ScriptedWorker("a", floods)
    async with running(model, worker, client_stall_s=0.3) as stack:
        _, writer = await post(stack, stream=True, max_tokens=8100, logprobs=True, top_logprobs=20)
        await until(lambda: stack.count("slow_clients") == 1)
        async with asyncio.timeout(HANG_S):
            await worker.attempts[0].aborted.wait()
        # The connection itself is gone, although nobody read what was written to it.
        await until(lambda: not stack.connections())
        writer.transport.abort()


async def test_another_router_is_asked_and_without_any_the_frontend_chooses(model: Model) -> None:
    async with running(model, ScriptedWorker("a", says(model)), ScriptedWorker("b", says(model))) as stack:
        dead = registry_pb2.Router(id="router-0", address="127.0.0.1:1")
        stack.router_view._items["router-0"] = dead
        for _ in range(4):
            text, story = await stream_text(stack)
            assert (text, story["worker"]) == (TEXT, "a")
        await stack.router.stop()
        text, story = await stream_text(stack)
        assert text == TEXT
        assert story["reasons"] == ["MERGED_FALLBACK"]
        assert stack.count("own_choices") == 1


async def test_a_silent_router_is_not_waited_for(model: Model) -> None:
    async with running(model, ScriptedWorker("a", says(model)), ScriptedWorker("b", says(model))) as stack:
        other = ScriptedRouter(stack.workers)
        await other.start()
        try:
            stack.router_view._items["router-0"] = registry_pb2.Router(id="router-0", address=other.address)
            other.silent = True
            for number in range(3):
                text, story = await stream_text(stack)
                assert (text, story["worker"], len(stack.router.requests)) == (TEXT, "a", number + 1)
            # The one that answered is asked first, and falls silent.
            stack.router.silent, other.silent = True, False
            before = len(other.requests)
            for number in range(3):
                text, story = await stream_text(stack)
                assert (text, story["worker"], len(other.requests)) == (TEXT, "a", before + number + 1)
            await until(lambda: stack.router.cancelled == len(stack.router.requests) - 3 >= 1)
            # Nobody answers: their deadlines, then a choice of our own.
            stack.router.silent = other.silent = True
            text, story = await stream_text(stack)
            assert (text, story["reasons"]) == (TEXT, ["MERGED_FALLBACK"])
        finally:
            await other.stop()


async def test_strict_without_a_router_is_refused(model: Model) -> None:
    async with running(model, ScriptedWorker("a", says(model)), strict=True) as stack:
        await stack.router.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            await stream_text(stack)
    assert caught.value.code == "router_unavailable"


async def test_a_worker_that_leaves_keeps_its_running_streams(model: Model) -> None:
    go = asyncio.Event()

    async def waits(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:3], offset=0)
        await go.wait()
        await attempt.tokens(ids_of(model)[3:], offset=3, finish="stop")

    worker = ScriptedWorker("a", waits)
    async with running(model, worker) as stack:
        reading = asyncio.create_task(stream_text(stack))
        await until(lambda: bool(worker.attempts))
        stack.worker_view.change("a", b"")
        await asyncio.sleep(0.1)
        assert worker.sessions
        go.set()
        text, story = await reading
        assert (text, story["attempts"]) == (TEXT, 1)
        await until(lambda: not worker.sessions)
        assert not stack.sessions.live()


async def test_many_at_once_are_not_mixed(model: Model) -> None:
    async def echoes(attempt: Attempt) -> None:
        await attempt.play([*attempt.message.prompt_ids, EOS], pause_s=0.001)

    async with running(model, ScriptedWorker("a", echoes), ScriptedWorker("b", echoes)) as stack:
        api = client(stack).completions

        async def one(i: int) -> None:
            prompt = f"request number {i} says {i * 7919}"
            stream = await api.create(model=model.name, prompt=prompt, stream=True, max_tokens=200)
            assert "".join([c.choices[0].text async for c in stream]) == prompt

        await asyncio.gather(*(one(i) for i in range(100)))
    assert stack.count("requests", endpoint="completions", outcome="ok") == 100
