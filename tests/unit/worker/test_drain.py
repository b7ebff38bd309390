"""Draining: nothing new, what runs may end, what does not is handed back."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import BatonError, Reason
from baton.v1 import worker_pb2 as pb
from baton.worker.drain import drain
from tests.unit.worker.engine import token
from tests.unit.worker.pair import HANG_S, pair

LOCAL = pb.Plan(mode=pb.MODE_LOCAL)


async def test_what_runs_may_end() -> None:
    async with pair() as both:
        serving = both.decode.serving
        await both.client.submit("u", [1, 2, 3], LOCAL, max_tokens=50)
        left = await asyncio.wait_for(drain(both.decode.context, serving.attempts, serving.runs, None), HANG_S)
        assert left == 0
        await both.client.until("u")
        assert both.client.tokens("u") == [token([1, 2, 3], 0, i) for i in range(50)]
        with pytest.raises(BatonError) as refused:
            await both.client.submit("v", [1], LOCAL)
        assert refused.value.reason is Reason.DRAINING


async def test_what_does_not_is_handed_back() -> None:
    async with pair() as both:
        serving = both.decode.serving
        await both.client.submit("u", [1, 2, 3], both.plan(), max_tokens=50)
        await both.client.first("u")
        both.decode.engine.gate.clear()
        left = await asyncio.wait_for(drain(both.decode.context, serving.attempts, serving.runs, 0.05), HANG_S)
        assert left == 0
        last = await both.client.until("u")
        assert last.handback.reason == "DRAINING"
        assert last.HasField("route")
        await both.idle()


async def test_a_prefill_ends_its_leases() -> None:
    async with pair() as both:
        await both.client.submit("u", list(range(1, 400)), both.plan())
        async with asyncio.timeout(HANG_S):
            while not both.prefill.engine.made:  # noqa: ASYNC110 - polls another task's progress
                await asyncio.sleep(0)
        both.prefill.engine.gate.clear()
        serving = both.prefill.serving
        task = asyncio.create_task(drain(both.prefill.context, serving.attempts, serving.runs, 0.05))
        last = await both.client.until("u")
        assert last.handback.reason == "PREFILL_UNAVAILABLE"  # DRAINING would say that decode drains
        assert list(last.route.reasons) == ["PREFILL_UNAVAILABLE", "HANDBACK"]
        assert await asyncio.wait_for(task, HANG_S) == 0


async def test_runs_are_taken_until_everybody_may_know() -> None:
    """A plan may be older than the news; a refused run would have to fall back."""
    async with pair() as both:
        serving = both.prefill.serving
        work = drain(both.prefill.context, serving.attempts, serving.runs, None, announce_s=HANG_S)
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        assert both.prefill.context.draining
        await both.client.submit("u", list(range(1, 40)), both.plan(), max_tokens=5)
        assert not (await both.client.until("u")).HasField("handback")
        task.cancel()
        await drain(both.prefill.context, serving.attempts, serving.runs, None, announce_s=0.01)
        await both.client.submit("v", list(range(1, 40)), both.plan(), max_tokens=5)
        last = await both.client.until("v")
        assert last.handback.reason == "PREFILL_UNAVAILABLE"
