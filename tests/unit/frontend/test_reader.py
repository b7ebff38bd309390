"""Bodies: the same answer wherever they are read, and nobody held up by a large one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, Reason
from baton.model.card import Model
from services.frontend import reader as module
from services.frontend.asked import Api, Asked, Reading, Unread, pack, unpack
from services.frontend.gate import Gate
from services.frontend.metrics import FrontendMetrics
from services.frontend.reader import LARGE_BYTES, BodyReader
from tests.stopping import stop
from tests.unit.frontend.peers import HANG_S, ScriptedWorker, running, until
from tests.unit.frontend.test_failures import post, says

CHAT, TEXT = Api.CHAT, Api.COMPLETION
LIMIT = 2048
MIB = 1 << 20
LARGE = 27 * MIB
STALL_S = 2.0
"""Only a hang is this late."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def reader(model: Model) -> AsyncIterator[BodyReader]:
    reader = BodyReader(model, FrontendMetrics(CollectorRegistry()))
    yield reader
    await reader.close()


def body(model: Model, padding: int = 0, **fields: Any) -> bytearray:
    """A request; `padding` is an ignored field of so many bytes."""
    return bytearray(json.dumps({"model": model.name, "ignored": "x" * padding, **fields}).encode())


@contextlib.contextmanager
def lateness(what: str) -> Iterator[None]:
    """The loop answers meanwhile: it is never late by a hang. What it was is printed."""
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - began - 0.005)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        print(f"{what}: loop late by at most {worst * 1000:.1f} ms")
    assert worst < STALL_S


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (
            TEXT,
            {"prompt": "Hello wörld 😀", "echo": True, "logprobs": 2, "n": 3, "stop": ["a", "b"], "seed": -5},
        ),
        (
            TEXT,
            {"prompt": [[1, 2, 3], [4] * 100], "logit_bias": {"7": 1.5, "8": -100}, "stop_token_ids": [5]},
        ),
        (TEXT, {"prompt": ["one", "two"], "temperature": 0.5, "top_k": 4, "min_p": 0.1, "max_tokens": 9}),
        (CHAT, {"messages": [{"role": "user", "content": "hi " * 50}], "logprobs": True, "top_logprobs": 3}),
    ],
)
async def test_process_and_thread_read_the_same(
    reader: BodyReader, model: Model, api: Api, fields: dict[str, Any]
) -> None:
    small = await reader.read(Unread(body(model, **fields), api, LIMIT))
    large = await reader.read(Unread(body(model, LARGE_BYTES, **fields), api, LIMIT))
    assert large == small == unpack(pack(small))
    assert isinstance(small, Asked)
    assert all(len(p.keys) == len(p.ids) // 32 for p in small.prompts)


def large_bodies(model: Model) -> dict[str, tuple[Api, bytearray, Reason]]:
    """27 MB each, of every kind that costs something to read."""
    head = f'{{"model":"{model.name}",'.encode()
    word = "all work and no play "
    many = [{"role": "user", "content": "x"}] * (LARGE // 34)
    too_long, invalid = Reason.CONTEXT_LENGTH_EXCEEDED, Reason.INVALID_REQUEST
    return {
        "text": (TEXT, body(model, prompt=word * (LARGE // len(word))), too_long),
        "wide text": (TEXT, bytearray(head + b'"prompt":"' + "语".encode() * (LARGE // 3) + b'"}'), too_long),
        "token ids": (TEXT, bytearray(head + b'"prompt":[1' + b",12345" * (LARGE // 6) + b"]}"), too_long),
        "one message": (CHAT, body(model, messages=[{"role": "user", "content": word * (LARGE // 21)}]), too_long),
        "messages": (CHAT, body(model, messages=many), too_long),
        "small lists": (TEXT, bytearray(head + b'"prompt":[[]' + b",[]" * (LARGE // 3) + b"]}"), invalid),
        "nesting": (
            TEXT,
            bytearray(head + b'"prompt":' + b"[" * 100_000 + b" " * LARGE + b"]" * 100_000 + b"}"),
            invalid,
        ),
        "stop ids": (
            TEXT,
            bytearray(head + b'"prompt":"a","stop_token_ids":[1' + b",2" * (LARGE // 2) + b"]}"),
            invalid,
        ),
    }


KINDS = ("text", "wide text", "token ids", "one message", "messages", "small lists", "nesting", "stop ids")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_large_body_is_refused_for_what_is_wrong_with_it(reader: BodyReader, model: Model, kind: str) -> None:
    api, large, reason = large_bodies(model)[kind]
    with lateness(kind), pytest.raises(BatonError) as caught:
        await reader.read(Unread(large, api, LIMIT))
    assert caught.value.reason is reason, caught.value


async def test_a_large_body_is_answered_over_http_and_probes_meanwhile(model: Model) -> None:
    worker = ScriptedWorker("a", says(model))
    async with running(model, worker, max_body_bytes=2 * LARGE, max_body_held=2 * LARGE) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S) as http:
            text = body(model, prompt="all work and no play " * (LARGE // 21))
            with lateness("post"):
                answer = await http.post(
                    "/v1/completions", content=bytes(text), headers={"content-type": "application/json"}
                )
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            padded = body(model, LARGE, prompt="Say it.", max_tokens=64)
            answer = await http.post(
                "/v1/completions", content=bytes(padded), headers={"content-type": "application/json"}
            )
            assert answer.status_code == 200, answer.text
        assert stack.count("bodies", where="process") == 2
        assert stack.frontend.gate.held == (0, 0)
        assert not worker.background.failures


def _child(reader: BodyReader) -> int:
    process = reader._process._process
    assert process is not None
    return process.pid


async def test_a_reader_that_was_killed_is_replaced(reader: BodyReader, model: Model) -> None:
    good = body(model, LARGE_BYTES, prompt="hi")
    first = await reader.read(Unread(good, TEXT, LIMIT))
    os.kill(_child(reader), signal.SIGKILL)
    assert await reader.read(Unread(good, TEXT, LIMIT)) == first


async def test_a_body_that_kills_its_reader_is_refused(
    reader: BodyReader, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = module._Process._ask

    async def dies(self: Any, *args: Any) -> bytes:
        task = asyncio.create_task(ask(self, *args))
        await until(lambda: self._process is not None)
        self._process.kill()
        return await task

    monkeypatch.setattr(module._Process, "_ask", dies)
    with pytest.raises(BatonError) as caught:
        await reader.read(Unread(body(model, LARGE_BYTES, prompt="hi"), TEXT, LIMIT))
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE
    monkeypatch.undo()
    assert (await reader.read(Unread(body(model, LARGE_BYTES, prompt="hi"), TEXT, LIMIT))).prompts


async def test_a_reading_that_is_cancelled_or_late_leaves_nothing_behind(
    reader: BodyReader, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = large_bodies(model)["small lists"][1]
    task = asyncio.create_task(reader.read(Unread(slow, TEXT, LIMIT)))
    await until(lambda: reader._process._streams is not None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    other = await reader.read(Unread(body(model, LARGE_BYTES, prompt="other"), TEXT, LIMIT))
    assert other.prompts[0].text == "other"
    monkeypatch.setattr(module, "READ_S", 0.01)
    with pytest.raises(BatonError) as caught:
        await reader.read(Unread(slow, TEXT, LIMIT))
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE
    assert "0.01 s" in caught.value.message
    assert set(reader._waiting.values()) == {0}


async def test_who_goes_away_costs_the_next_one_no_new_process(reader: BodyReader, model: Model) -> None:
    """A new process takes seconds to start: clients that do not wait would hold up the bodies of all others."""
    good = body(model, LARGE_BYTES, prompt="hi")
    first = await reader.read(Unread(good, TEXT, LIMIT))
    child = _child(reader)
    stop(child)  # so that it is in the middle of one when that goes away
    large = body(model, 8 * MIB, prompt="gone")
    task = asyncio.create_task(reader.read(Unread(large, TEXT, LIMIT)))
    await until(lambda: reader._process._turn.locked())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    large.clear()  # as the request's end does
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGCONT)
    assert await reader.read(Unread(good, TEXT, LIMIT)) == first
    assert _child(reader) == child


async def test_a_body_that_nobody_waits_for_holds_up_the_next_for_a_bounded_time(
    reader: BodyReader, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = body(model, LARGE_BYTES, prompt="hi")
    first = await reader.read(Unread(good, TEXT, LIMIT))
    child = _child(reader)
    stop(child)  # as slow as can be
    task = asyncio.create_task(reader.read(Unread(good, TEXT, LIMIT)))
    await until(lambda: reader._process._turn.locked())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    monkeypatch.setattr(module, "SETTLE_S", 0.01)
    assert await reader.read(Unread(good, TEXT, LIMIT)) == first
    assert _child(reader) != child


async def test_a_process_that_does_not_start_is_no_fault_of_the_body(
    reader: BodyReader, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_S", 0.01)
    with pytest.raises(BatonError) as caught:
        await reader.read(Unread(body(model, LARGE_BYTES, prompt="hi"), TEXT, LIMIT))
    assert caught.value.reason is Reason.NO_CAPACITY


async def test_bodies_that_wait_are_bounded(reader: BodyReader, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.MAX_WAITING, "process", 2)
    large = body(model, LARGE_BYTES, prompt="hi")
    tasks = [asyncio.create_task(reader.read(Unread(large, TEXT, LIMIT))) for _ in range(5)]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [a for a in answers if isinstance(a, BatonError)]
    assert [e.reason for e in refused] == [Reason.NO_CAPACITY] * 3
    assert len(answers) - len(refused) == 2


def test_the_gate_counts_requests_and_bytes() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    gate = Gate(2, 100, metrics)
    first, second = gate.enter(), gate.enter()
    with pytest.raises(BatonError) as caught:
        gate.enter()
    assert caught.value.reason is Reason.NO_CAPACITY
    first.body(40)
    first.body(60)
    with pytest.raises(BatonError):
        second.body(41)
    second.body(40)
    assert gate.held == (2, 100)
    first.body_read()
    first.body_read()
    second.body(100)
    for entered in (first, second, first):
        entered.leave()
    assert gate.held == (0, 0)
    refused = {
        bound: metrics.registry.get_sample_value("baton_frontend_refused_total", {"bound": bound})
        for bound in ("requests", "bytes")
    }
    assert refused == {"requests": 1, "bytes": 1}


async def test_a_client_that_does_not_send_its_body_is_cut_off(model: Model) -> None:
    async with running(model, ScriptedWorker("a", says(model)), client_stall_s=0.3) as stack:
        address = stack.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(address[0], int(address[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        async with asyncio.timeout(HANG_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.transport.abort()
        await until(lambda: not stack.connections())
        assert stack.count("slow_clients") == 1
        assert stack.frontend.gate.held == (0, 0)


async def test_what_is_over_the_bound_is_refused_before_it_is_read(model: Model) -> None:
    async def waits(attempt: Any) -> None:
        await attempt.aborted.wait()

    async with running(model, ScriptedWorker("a", waits), max_requests=3) as stack:
        connections = [await post(stack, stream=True) for _ in range(3)]
        await until(lambda: len(stack.workers[0].attempts) == 3)
        read = stack.count("bodies", where="thread")
        async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S) as http:
            answer = await http.post("/v1/completions", json={"model": model.name, "prompt": "hi"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "no_capacity")
            assert int(answer.headers["retry-after"]) >= 1
            assert (await http.get("/health")).status_code == 200
        assert stack.count("bodies", where="thread") == read
        assert stack.count("refused", bound="requests") == 1
        for _, writer in connections:
            writer.transport.abort()
        await until(lambda: stack.frontend.gate.held == (0, 0))


def test_reading_refuses_another_model(model: Model) -> None:
    with pytest.raises(BatonError) as caught:
        Reading(model).read(Unread(b'{"model": "gpt", "prompt": "hi"}', TEXT, LIMIT))
    assert caught.value.reason is Reason.MODEL_NOT_FOUND
