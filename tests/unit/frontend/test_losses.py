"""Losses that come together: many outputs at once, one after the other, and while nobody is there to go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.v1 import kv_pb2
from tests.unit.frontend.peers import HANG_S, Attempt, ScriptedWorker, Stack, running, until
from tests.unit.frontend.test_failures import TEXT, client, ids_of

pytestmark = pytest.mark.timeout(60)
HI: list[Any] = [{"role": "user", "content": "hi"}]
MANY = 8


def failed(attempt: Attempt, reason: Reason) -> Any:
    return attempt.event(failure=kv_pb2.Failure(reason=reason.name, message="as the test wants"))


async def completion(stack: Stack, **fields: Any) -> tuple[dict[int, str], list[str]]:
    """A streamed completion: texts by output, and the codes of error events."""
    texts: dict[int, str] = {}
    errors: list[str] = []
    body = {"model": stack.model.name, "stream": True, "max_tokens": 99, **fields}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=HANG_S) as http,
        http.stream("POST", f"{stack.url}/v1/completions", json=body) as reply,
    ):
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                errors.append(chunk["error"]["code"])
            for choice in chunk.get("choices", ()):
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts, errors


async def test_many_outputs_lose_their_worker_twice(model: Model) -> None:
    """Each is an attempt of its own after the first loss: that the second takes all of them is one failure of each."""
    ids = ids_of(model)

    async def begins(attempt: Attempt) -> None:
        for choice in attempt.message.choices:
            await attempt.tokens(ids[:3], offset=0, choice=choice)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    async def dies_with_all(attempt: Attempt) -> None:
        if len(attempt.worker.attempts) == MANY:
            await asyncio.sleep(0.05)
            attempt.worker.cut()

    async def computes_all_prompts_first(attempt: Attempt) -> None:
        await until(lambda: len(attempt.worker.attempts) == MANY)
        await attempt.play(ids, choice=attempt.message.choices[0])

    scripts = (begins, dies_with_all, computes_all_prompts_first)
    workers = [ScriptedWorker(name, script) for name, script in zip("abc", scripts, strict=True)]
    async with running(model, *workers) as stack:
        answer = await client(stack).chat.completions.create(model=model.name, messages=HI, n=MANY)
    assert [c.message.content for c in answer.choices] == [TEXT] * MANY
    assert len(workers[1].attempts) == MANY


async def test_an_output_without_a_token_waits_as_long_as_those_beside_it(model: Model) -> None:
    """Its client has half of an answer: that is worth as much waiting as a stream of one output is."""
    ids, back = ids_of(model), asyncio.Event()

    async def script(attempt: Attempt) -> None:
        if back.is_set():
            await attempt.play(ids)
        elif attempt.message.uid.endswith("-0"):
            await attempt.tokens(ids[:3], offset=0)

    worker = ScriptedWorker("only", script)
    async with running(model, worker) as stack:
        task = asyncio.create_task(completion(stack, prompt=["one", "two"]))
        await until(lambda: len(worker.attempts) == 2)
        await asyncio.sleep(0.3)
        worker.refusal = BatonError(Reason.NO_CAPACITY, "full")
        worker.cut()
        await asyncio.sleep(1.0)
        back.set()
        worker.refusal = None
        texts, errors = await task
    assert not errors
    assert texts == {0: TEXT, 1: TEXT}


async def test_an_engine_that_cannot_be_reached_for_a_moment_is_waited_for(model: Model) -> None:
    """It takes attempts and fails them at once, as a worker does whose upstream is away and not yet known to be."""
    ids, back = ids_of(model), asyncio.Event()

    async def script(attempt: Attempt) -> None:
        if back.is_set():
            await attempt.play(ids)
            return
        if not attempt.message.emitted_ids:
            await attempt.tokens(ids[:3], offset=0)
        await attempt.send(failed(attempt, Reason.DECODE_UNAVAILABLE))

    worker = ScriptedWorker("only", script)
    async with running(model, worker) as stack:
        task = asyncio.create_task(completion(stack, prompt="one"))
        await until(lambda: worker.attempts)
        await asyncio.sleep(1.5)
        back.set()
        texts, errors = await task
    assert not errors
    assert texts == {0: TEXT}


async def test_the_worker_with_the_long_context_is_waited_for(model: Model) -> None:
    """Those that are left take less than prompt and output have come to."""
    ids = ids_of(model)

    async def script(attempt: Attempt) -> None:
        if attempt.message.emitted_ids:
            await attempt.play(ids)
            return
        await attempt.tokens(ids[:3], offset=0)
        stack.router.refusal = BatonError(Reason.CONTEXT_LENGTH_EXCEEDED, "short takes 8 tokens")
        attempt.worker.cut()

    worker = ScriptedWorker("long", script)
    async with running(model, worker) as stack:
        task = asyncio.create_task(completion(stack, prompt="one"))
        await until(lambda: stack.router.refusal is not None)
        await asyncio.sleep(1.0)
        stack.router.refusal = None
        texts, errors = await task
    assert not errors
    assert texts == {0: TEXT}


async def test_outputs_that_are_well_go_on_while_another_waits_for_a_place(model: Model) -> None:
    ids, full, back = ids_of(model), asyncio.Event(), asyncio.Event()

    async def script(attempt: Attempt) -> None:
        if attempt.message.uid.endswith("-1") or attempt.message.emitted_ids:
            await full.wait()
            await attempt.play(ids)
        else:
            await attempt.tokens(ids[:3], offset=0)
            await until(lambda: len(attempt.worker.attempts) == 2)
            attempt.worker.refusal = BatonError(Reason.NO_CAPACITY, "full")
            full.set()
            await attempt.send(failed(attempt, Reason.ENGINE_FAILED))

    worker = ScriptedWorker("only", script)
    whole: set[int] = set()
    async with running(model, worker) as stack:

        async def second_comes() -> None:
            await until(lambda: 1 in whole)
            worker.refusal = None
            back.set()

        releasing = asyncio.create_task(second_comes())
        body = {"model": model.name, "stream": True, "max_tokens": 99, "prompt": ["one", "two"]}
        texts: dict[int, str] = {}
        async with (
            httpx.AsyncClient(trust_env=False, timeout=HANG_S) as http,
            http.stream("POST", f"{stack.url}/v1/completions", json=body) as reply,
        ):
            async for line in reply.aiter_lines():
                for choice in json.loads(line[6:]).get("choices", ()) if line.startswith("data: {") else ():
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                    if choice["finish_reason"]:
                        whole.add(choice["index"])
        releasing.cancel()
    assert back.is_set(), "the second output came only with the first"
    assert texts == {0: TEXT, 1: TEXT}
