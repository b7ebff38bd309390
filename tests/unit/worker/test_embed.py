"""Embeddings on a worker: in order, a bounded part of the pool at a time, and nothing left however a call ends."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from baton.v1 import worker_pb2 as pb
from baton.worker import embed
from baton.worker.embed import Room
from tests.unit.worker.pair import CARD, HANG_S, Worker, pair


def request(*inputs: list[int], deadline_s: float = HANG_S, **fields: Any) -> pb.EmbedRequest:
    ids = [pb.TokenIds(ids=one) for one in inputs]
    return pb.EmbedRequest(**{"uid": "e", "inputs": ids, "deadline": time.time() + deadline_s, "card": CARD} | fields)


async def refusal(worker: Worker, asked: pb.EmbedRequest) -> Reason:
    with pytest.raises(BatonError) as caught:
        await worker.serving.embeddings.embed(asked)
    assert worker.serving.embeddings.findings() == []
    assert worker.engine.embedding == []
    return caught.value.reason


async def test_each_input_has_its_vector_in_order() -> None:
    async with pair() as both:
        made = await both.prefill.serving.embeddings.embed(request([1, 2], [3], [4, 5, 6]))
        assert [struct.unpack("<f", one)[0] for one in made] == [3.0, 3.0, 15.0]
        assert both.prefill.serving.embeddings.findings() == []


async def test_what_cannot_be_made_is_refused_with_its_reason() -> None:
    async with pair() as both:
        worker = both.prefill
        assert await refusal(worker, request([1], card=None)) is Reason.MODEL_NOT_FOUND
        assert await refusal(worker, request([1], deadline_s=-1.0)) is Reason.DEADLINE_EXCEEDED
        worker.engine.fail_reserve = BatonError(Reason.NO_CAPACITY, "full")
        assert await refusal(worker, request([1], [2], [3])) is Reason.NO_CAPACITY
        worker.engine.fail_reserve = None
        worker.engine.gate.clear()
        assert await refusal(worker, request([1], deadline_s=0.2)) is Reason.DEADLINE_EXCEEDED
        worker.context.draining = True
        assert await refusal(worker, request([1])) is Reason.DRAINING


async def test_a_stuck_engine_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "WATCH_S", 0.05)
    async with pair() as both:
        both.prefill.engine.gate.clear()
        making = asyncio.create_task(refusal(both.prefill, request([1], [2])))
        while not both.prefill.engine.embedding:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        both.prefill.engine.stopped_at = 1.0
        assert await making is Reason.ENGINE_FAILED


async def test_inputs_share_a_part_of_the_pool_and_a_cancelled_call_gives_it_back() -> None:
    async with pair() as both:
        worker = both.prefill
        worker.engine.gate.clear()
        asked = request(*([1] * 40 for _ in range(10)), [1] * 900)  # blocks of 4: 10 each, of 25; and 225
        calls = [asyncio.create_task(worker.serving.embeddings.embed(asked)) for _ in range(3)]
        async with asyncio.timeout(HANG_S):
            while len(worker.engine.embedding) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert worker.engine.embedding == [40, 40]
        assert any("embeddings of e" in one for one in worker.serving.embeddings.findings())
        for call in calls[:2]:
            call.cancel()
        await asyncio.gather(*calls[:2], return_exceptions=True)
        worker.engine.gate.set()
        assert len(await calls[2]) == 11
        assert worker.serving.embeddings.findings() == []


async def test_nobody_waits_behind_the_batch_lane() -> None:
    async with pair() as both:
        worker = both.prefill
        worker.engine.gate.clear()
        lined = request(*([1] * 40 for _ in range(10)))
        lined.batch = True
        calls = [worker.serving.embeddings.embed(lined) for _ in range(embed.MAX_WAITING)]
        making = [asyncio.create_task(call) for call in (*calls, worker.serving.embeddings.embed(request([1] * 7)))]
        async with asyncio.timeout(HANG_S):
            while len(worker.engine.embedding) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert sorted(worker.engine.embedding) == [7, 40, 40]
        assert worker.engine.lined == [40, 40]
        worker.engine.gate.set()
        await asyncio.gather(*making)
        assert worker.serving.embeddings.findings() == []


async def test_so_many_calls_wait_and_no_more() -> None:
    async with pair() as both:
        worker = both.prefill
        worker.engine.gate.clear()
        calls = [asyncio.create_task(worker.serving.embeddings.embed(request([1]))) for _ in range(embed.MAX_WAITING)]
        await asyncio.sleep(0.05)
        with pytest.raises(BatonError) as caught:
            await worker.serving.embeddings.embed(request([1]))
        assert caught.value.reason is Reason.NO_CAPACITY
        assert await worker.serving.embeddings.idle(0.01) == embed.MAX_WAITING
        worker.engine.gate.set()
        await asyncio.gather(*calls)
        assert await worker.serving.embeddings.idle(HANG_S) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5), st.integers(0, 9)), max_size=25))
def test_room_is_never_exceeded_and_never_lost(visits: list[tuple[int, int, int]]) -> None:
    """Each comes, stays a few turns of the loop, and may be cancelled at any of them."""

    async def play() -> None:
        room, inside = Room(4, 10), []

        async def visit(blocks: int, stay: int) -> None:
            async with room.take(blocks):
                inside.append(blocks)
                assert len(inside) <= 4
                assert sum(inside) <= 10 or len(inside) == 1
                try:
                    for _ in range(stay):
                        await asyncio.sleep(0)
                finally:
                    inside.remove(blocks)

        tasks = []
        for blocks, stay, cancel_after in visits:
            tasks.append(asyncio.create_task(visit(blocks, stay)))
            for _ in range(cancel_after % 3):
                await asyncio.sleep(0)
            if cancel_after > 6:
                tasks[cancel_after % len(tasks)].cancel()
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in tasks if not one.cancelled() and one.exception()]
        assert room.findings() == []
        assert not room._waiting

    asyncio.run(play())
