"""Who is let in, who is told to go, and that one request's fault stays its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.port import CacheEvent, Request
from baton.errors import BatonError, Reason
from baton.kv.keys import block_keys
from tests.unit.torch_engine.client import HANG_S, ROOT, Client, request
from tests.unit.torch_engine.conftest import Oracle, make_engine

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROMPT = [(i * i + 11 * i) % 300 for i in range(100)]


async def refused(client: Client, asked: Request) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await client.engine.reserve(asked)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "reason", "param"),
    [
        ({"prompt": []}, Reason.INVALID_REQUEST, "prompt_ids"),
        ({"prompt": [1, 320]}, Reason.INVALID_REQUEST, "prompt_ids"),
        ({"prompt": [-1]}, Reason.INVALID_REQUEST, "prompt_ids"),
        ({"prompt": [2**40]}, Reason.INVALID_REQUEST, "prompt_ids"),
        ({"prompt": [1], "emitted": [320]}, Reason.INVALID_REQUEST, "emitted_ids"),
        ({"prompt": [1], "emitted": [1, 2], "max_tokens": 2}, Reason.INVALID_REQUEST, "max_tokens"),
        ({"prompt": [1], "emitted": [1], "choices": (0, 1)}, Reason.INVALID_REQUEST, "emitted_ids"),
        ({"prompt": [1], "choices": ()}, Reason.INVALID_REQUEST, "n"),
        ({"prompt": [1], "choices": (1, 1)}, Reason.INVALID_REQUEST, "n"),
        ({"prompt": [1], "logit_bias": {320: 1.0}}, Reason.INVALID_REQUEST, "logit_bias"),
        ({"prompt": [1], "stop_token_ids": (320,)}, Reason.INVALID_REQUEST, "stop_token_ids"),
        ({"prompt": [1], "temperature": float("nan")}, Reason.INVALID_REQUEST, "temperature"),
        ({"prompt": [1], "repetition_penalty": float("inf")}, Reason.INVALID_REQUEST, "repetition_penalty"),
        ({"prompt": [1], "temperature": -0.1}, Reason.INVALID_REQUEST, "temperature"),
        ({"prompt": [1], "top_p": 1.1}, Reason.INVALID_REQUEST, "top_p"),
        ({"prompt": [1], "min_p": 5.0}, Reason.INVALID_REQUEST, "min_p"),
        ({"prompt": [1], "repetition_penalty": 0.0}, Reason.INVALID_REQUEST, "repetition_penalty"),
        ({"prompt": [1], "logit_bias": {3: float("nan")}}, Reason.INVALID_REQUEST, "logit_bias"),
        ({"prompt": [1], "logprobs": 2**32 - 1}, Reason.INVALID_REQUEST, "logprobs"),
        ({"prompt": [1], "prompt_logprobs": 129}, Reason.INVALID_REQUEST, "prompt_logprobs"),
        ({"prompt": [1], "choices": tuple(range(129))}, Reason.INVALID_REQUEST, "n"),
        ({"prompt": [1], "choices": (2**32 - 1,)}, Reason.INVALID_REQUEST, "n"),
        ({"prompt": [1] * 2048}, Reason.CONTEXT_LENGTH_EXCEEDED, "prompt_ids"),
    ],
)
async def test_bad_requests(client: Client, changes: dict[str, Any], reason: Reason, param: str) -> None:
    error = await refused(client, request(**changes))
    assert (error.reason, error.param) == (reason, param)


async def test_one_attempt_once(client: Client) -> None:
    first = await client.engine.reserve(request(PROMPT, uid="same"))
    error = await refused(client, request(PROMPT, uid="same"))
    assert error.reason is Reason.DUPLICATE_REQUEST
    await first.release()
    again = await client.engine.reserve(request(PROMPT, uid="same"))
    await again.release()


async def test_a_full_pool_refuses_all_or_nothing(client: Client) -> None:
    spec = client.engine.spec
    reservation = await client.engine.reserve(request([1] * 32 * (spec.pool_blocks // 2 - 1), root=b"half" * 4))
    await client.engine.check_integrity()
    free = client.engine.stats().blocks_free
    assert free == spec.pool_blocks - spec.pool_blocks // 2
    error = await refused(client, request([1] * 32 * free, root=b"more" * 4))
    assert error.reason is Reason.NO_CAPACITY
    await client.engine.check_integrity()
    assert client.engine.stats().blocks_free == free
    await reservation.release()
    reservation = await client.engine.reserve(request([1] * 32 * free, root=b"more" * 4))
    await reservation.release()


async def test_too_many_requests(client: Client) -> None:
    limit = 8 * client.engine.spec.max_streams
    held = []
    error = None
    for n in range(limit + 1):
        try:
            held.append(await client.engine.reserve(request([1], uid=f"many{n}"), decode_room=False))
        except BatonError as refusal:
            error = refusal
            break
    assert error is not None
    assert error.reason is Reason.NO_CAPACITY
    for reservation in held:
        await reservation.release()


async def test_a_deadline_that_has_passed(client: Client, oracle: Oracle) -> None:
    other = await client.submit(request(PROMPT, max_tokens=40))
    stream = await client.submit(request(PROMPT, max_tokens=1500, deadline_s=0.15))
    with pytest.raises(BatonError) as caught:
        await stream.result()
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert len(stream.outputs[0].tokens) < 1500
    reservation = await client.engine.reserve(request(PROMPT, deadline_s=-1.0))
    with pytest.raises(BatonError) as caught:
        await client.prefill(reservation)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    await reservation.release()
    assert await other.tokens() == oracle(PROMPT, 40)


async def test_parameters_that_break_the_draw_break_nobody_else(client: Client, oracle: Oracle) -> None:
    """What no validation has caught: the one request fails, its neighbours in the batch do not notice."""
    bad = request(PROMPT, max_tokens=40, logprobs=-3)
    streams = [await client.submit(request(PROMPT, max_tokens=40)), await client.submit(bad)]
    with pytest.raises(BatonError) as caught:
        await streams[1].result()
    assert caught.value.reason is Reason.INTERNAL
    assert await streams[0].tokens() == oracle(PROMPT, 40)
    reservation = await client.engine.reserve(bad)
    with pytest.raises(BatonError) as caught:
        await client.prefill(reservation)
    assert caught.value.reason is Reason.INTERNAL
    await reservation.release()


async def test_a_distribution_that_is_none_ends_its_request(client: Client, oracle: Oracle) -> None:
    """Finite parameters can still leave nothing to draw from."""
    nothing = request(PROMPT, max_tokens=40, temperature=1.0, logit_bias={7: 1e300})
    streams = [await client.submit(request(PROMPT, max_tokens=40)), await client.submit(nothing)]
    with pytest.raises(BatonError) as caught:
        await streams[1].result()
    assert caught.value.reason is Reason.INTERNAL
    assert await streams[0].tokens() == oracle(PROMPT, 40)


async def test_first_tokens_are_of_every_choice_or_none(client: Client) -> None:
    reservation = await client.engine.reserve(request(PROMPT, choices=(0, 1)))
    _, done = await client.prefill(reservation)
    with pytest.raises(BatonError) as caught:
        await client.engine.generate(reservation, done.first[:1])
    assert caught.value.reason is Reason.INVALID_REQUEST
    outputs = await (await client.generate(reservation, done.first)).result()
    assert outputs[0].tokens == outputs[1].tokens, "greedy"


async def test_a_reservation_does_not_wait_for_a_step(client: Client) -> None:
    """While a prompt of many chunks is computed, others are let in and refused between two steps' lines of Python."""
    long = await client.engine.reserve(request([i % 300 for i in range(1500)]))
    await client.generate(long)
    steps = client.engine.stats().steps
    for n in range(20):
        reservation = await client.engine.reserve(request([n + 1]))
        await reservation.release()
    assert client.engine.stats().steps - steps < 20
    await long.release()


async def test_stats_follow(client: Client) -> None:
    before = client.engine.stats()
    await client.complete(request(PROMPT, max_tokens=20))
    await client.engine.check_integrity()
    after = client.engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 100
    assert after.prefill_tokens_computed - before.prefill_tokens_computed == 100
    assert after.output_tokens - before.output_tokens == 20
    assert after.steps - before.steps == 5 + 19  # chunks of 24, the last of which gives the first token
    assert (after.running, after.waiting, after.queued_prefill_tokens, after.step_started) == (0, 0, 0, 0.0)
    assert after.prefill_tok_s > 0
    assert after.decode_step_s > 0
    assert after.blocks_cached == 3


async def test_cache_events_rebuild_the_cache(tiny_model: Path) -> None:
    client = Client(make_engine(tiny_model, blocks=8))
    await client.engine.start()
    known: set[bytes] = set()
    seen: list[CacheEvent] = []

    async def follow() -> None:
        async for events in client.engine.cache_events():
            for event in events:
                seen.append(event)
                if event.cleared:
                    known.clear()
                known.update(event.stored)
                known.difference_update(event.removed)

    following = asyncio.create_task(follow())
    try:
        await client.complete(request(PROMPT, max_tokens=1))
        keys = block_keys(ROOT, PROMPT)
        await client.idle()
        assert known == set(keys)
        # Others push them out, the end of the prefix first.
        await client.complete(request(PROMPT, max_tokens=1, root=b"other tenant!!!!"))
        await client.idle()
        assert len(known) == client.engine.stats().blocks_cached
        assert await client.engine.clear_cache() > 0
        await client.idle()
        assert known == set()
        assert any(event.removed for event in seen)
    finally:
        await client.close()
        async with asyncio.timeout(HANG_S):
            await following


async def test_cache_events_that_nobody_reads(tiny_model: Path) -> None:
    """Beyond the bound the list starts again from the whole state."""
    client = Client(make_engine(tiny_model, blocks=8))
    await client.engine.start()
    try:
        for n in range(700):
            client.engine._cache.tell([n.to_bytes(16, "little")], [])
            client.engine._cache.tell([], [n.to_bytes(16, "little")])
        await client.complete(request(PROMPT, max_tokens=1))
        await client.idle()
        async with aclosing(client.engine.cache_events()) as events:  # type: ignore[type-var]
            first = await anext(events)
        assert first[0].cleared
        assert {key for event in first for key in event.stored} >= set(block_keys(ROOT, PROMPT))
    finally:
        await client.close()


async def test_others_get_the_blocks_of_the_batch_lane_at_any_moment(tiny_model: Path) -> None:
    """In the middle of its steps too; and whoever leaves meanwhile leaves nothing behind."""
    client = Client(make_engine(tiny_model, blocks=40))
    await client.engine.start()
    try:
        lines = [replace(request([n] * 140, max_tokens=200), batch=True) for n in range(5)]
        streams = [await client.submit(line) for line in lines]
        for n in range(60):
            await asyncio.sleep(0.003 * (n % 5))
            asking = asyncio.create_task(client.engine.reserve(request([n] * 32 * 30)))
            if n % 3:
                await (await asking).release()
                continue
            await asyncio.sleep(0.001)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await asking).release()
        for stream in streams:
            assert len(await stream.tokens()) == 200
        await client.idle()
    finally:
        await client.close()


async def test_an_input_of_the_batch_lane_makes_room(tiny_model: Path) -> None:
    client = Client(make_engine(tiny_model, blocks=40))
    await client.engine.start()
    try:
        await client.engine.pause_batch(3600.0)
        making = asyncio.create_task(client.engine.embed([3] * 32 * 29, time.time() + HANG_S, batch=True))
        async with asyncio.timeout(HANG_S):
            while not client.engine.stats().batch_blocks:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)
        await (await client.engine.reserve(request([4] * 32 * 30))).release()
        with pytest.raises(BatonError, match="others want the blocks") as caught:
            await making
        assert caught.value.reason is Reason.NO_CAPACITY
        await client.idle()
    finally:
        await client.close()
