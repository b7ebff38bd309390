"""Giving up in each stage, and what is refused: nothing is left behind, and who runs beside it is not hurt.

That nothing is left is looked for after every test, in every worker.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.v1 import worker_pb2 as pb
from tests.conformance.asking import answers, complete, disaggregated, merged
from tests.conformance.subjects import Subject
from tests.worker_process import Frontend, frontend

pytestmark = [pytest.mark.integration, pytest.mark.slow]

BESIDE = "The lighthouse keeper opened the door and"
BESIDE_TOKENS = 24


def long_prompt(seed: int, tokens: int = 300) -> list[int]:
    return random.Random(seed).choices(range(200, 4000), k=tokens)


@asynccontextmanager
async def beside(subject: Subject, client: Frontend, plan: pb.Plan, uid: str) -> AsyncIterator[None]:
    """A stream that runs meanwhile, and whose text is right in the end."""
    prompt = subject.tokenizer.encode(BESIDE, add_special=False)
    running = asyncio.create_task(complete(client, subject.tokenizer, uid, prompt, plan, max_tokens=BESIDE_TOKENS))
    try:
        yield
        answer = await running
    finally:
        running.cancel()
    assert (answer.tokens, answer.finish) == (BESIDE_TOKENS, "length")
    if subject.exact:
        assert answer.text == subject.golden(tuple(prompt), BESIDE_TOKENS)


async def submitted(client: Frontend, uid: str, plan: pb.Plan, prompt: list[int], **options: Any) -> None:
    attempt = client.attempt(uid, prompt, **{"max_tokens": 1000, **options})
    reply = await client.submit(attempt, plan)
    assert not reply.HasField("failure"), reply


@pytest.mark.parametrize("stage", ["at once", "while it computes the prompt", "while it streams"])
async def test_aborts(subject: Subject, client: Frontend, stage: str) -> None:
    plan = merged(subject.merged)
    async with beside(subject, client, plan, f"beside {stage}"):
        for n in range(4):
            uid = f"{stage} {n}"
            prompt = subject.tokenizer.encode(BESIDE, add_special=False) if stage == "while it streams" else None
            await submitted(client, uid, plan, prompt or long_prompt(n), choices=(0, 1) if n % 2 else (0,))
            if stage == "while it streams":
                async for event in client.events(uid):
                    if event.tokens.ids or event.text:
                        break
            elif stage != "at once":
                await asyncio.sleep(0.02 * n)
            await client.abort(uid)


@pytest.mark.parametrize("stage", ["at once", "while it is handed over", "while it streams"])
async def test_aborts_of_hand_overs(subject: Subject, decode: Frontend, stage: str) -> None:
    assert subject.prefill is not None
    assert subject.decode is not None
    plan = disaggregated(subject.prefill, subject.decode)
    async with beside(subject, decode, plan, f"pd beside {stage}"):
        for n in range(4):
            uid = f"pd {stage} {n}"
            await submitted(decode, uid, plan, long_prompt(100 + n, 64 if stage == "while it streams" else 300))
            if stage == "while it streams":
                async for event in decode.events(uid):
                    if event.tokens.ids:
                        break
            elif stage != "at once":
                await asyncio.sleep(0.1 + 0.1 * n)
            await decode.abort(uid)


async def test_the_end_of_a_session_is_an_abort(subject: Subject, client: Frontend) -> None:
    plan = merged(subject.merged)
    async with beside(subject, client, plan, "beside session"), frontend(subject.merged) as leaving:
        for n in range(3):
            await submitted(leaving, f"left {n}", plan, long_prompt(200 + n, 40))
        async for event in leaving.events("left 0"):
            if event.tokens.ids or event.text:
                break


async def test_a_deadline_ends_it(subject: Subject, client: Frontend) -> None:
    result = await client.run("late", long_prompt(300, 40), merged(subject.merged), max_tokens=1500, deadline_s=1.0)
    assert result.failure == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": [1] * 100_000}, "CONTEXT_LENGTH_EXCEEDED"),
        ({"prompt": [10**8]}, "INVALID_REQUEST"),
        ({"emitted": [10**8]}, "INVALID_REQUEST"),
        ({"deadline_s": -1.0}, "DEADLINE_EXCEEDED"),
    ],
    ids=str,
)
async def test_refusals_hurt_nobody(subject: Subject, client: Frontend, changes: dict[str, Any], reason: str) -> None:
    plan = merged(subject.merged)
    asked = {"prompt": [1, 2, 3], **changes}
    async with beside(subject, client, plan, f"beside {changes.keys()} {reason}"):
        reply = await client.submit(client.attempt("bad", asked.pop("prompt"), **asked), plan)
        assert reply.failure.reason == reason


async def test_one_attempt_runs_once(subject: Subject, client: Frontend) -> None:
    plan = merged(subject.merged)
    await submitted(client, "once", plan, long_prompt(400, 40))
    reply = await client.submit(client.attempt("once", [1, 2, 3]), plan)
    assert reply.failure.reason == "DUPLICATE_REQUEST"
    await client.abort("once")


async def test_a_burst_is_answered_in_full(subject: Subject, client: Frontend) -> None:
    """More at once than are computed at once."""
    plan = merged(subject.merged)
    prompts = [long_prompt(500 + n, 20) for n in range(16)]
    found = await asyncio.gather(
        *(client.run(f"burst {n}", prompt, plan, max_tokens=8) for n, prompt in enumerate(prompts))
    )
    for result in found:
        (answer,) = answers(result, subject.tokenizer).values()
        assert (answer.tokens, answer.finish) == (8, "length")
