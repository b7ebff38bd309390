"""What a worker says of the batch lane to routers, and what it lets frontends do to it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.engine.port import EngineStats
from baton.v1 import worker_pb2 as pb
from baton.worker import state
from baton.worker.service import MOST_PAUSE_S, WorkerServicer
from tests.unit.worker.pair import pair


async def test_what_gives_way_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = EngineStats(
        running=5,
        batch_running=3,
        waiting=4,
        batch_waiting=1,
        queued_prefill_tokens=100,
        batch_queued_tokens=60,
        blocks_total=100,
        blocks_free=20,
        batch_blocks=30,
    )
    async with pair() as both:
        monkeypatch.setattr(both.decode.engine, "stats", lambda: stats)
        load = state.load(both.decode.context)
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (2, 3, 40)
    assert load.blocks_free == 50, "others get them when they want them"


@pytest.mark.parametrize(
    ("asked", "told"),
    [(0.3, 0.3), (5.0, 5.0), (1e308, MOST_PAUSE_S), (math.inf, MOST_PAUSE_S)]
    + [(nothing, None) for nothing in (0.0, -0.0, -1.0, -math.inf, math.nan)],
)
async def test_a_pause_is_bounded(monkeypatch: pytest.MonkeyPatch, asked: float, told: float | None) -> None:
    found: list[float] = []

    async def pause(seconds: float) -> None:
        found.append(seconds)

    others: list[Any] = [None] * 9
    async with pair() as both:
        monkeypatch.setattr(both.decode.engine, "pause_batch", pause)
        await WorkerServicer(both.decode.context, *others).PauseBatch(pb.PauseBatchRequest(seconds=asked), None)
    assert found == ([] if told is None else [told])
