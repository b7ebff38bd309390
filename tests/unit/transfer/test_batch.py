"""Whatever the order of posting, settling and giving up: a chunk is late exactly when its bytes may still come."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment
from baton.transfer.nixl.batch import Batch, Chunk, State
from baton.transfer.nixl.driver import Link
from baton.transfer.quarantine import Quarantine
from baton.transfer.screen import collisions

CHUNKS = 3
ARENA = Arena.create(4096)
STEP = st.tuples(st.sampled_from(["begin", "settle", "fail", "abandon"]), st.integers(0, CHUNKS - 1))


def handle(length: int = 64) -> Handle:
    return Handle(b"k" * 16, "f", "o", 1, 1, 32, (Segment(0, 0, length),), 0)


def batch_of(late_settled: list[Chunk]) -> tuple[Batch, list[Chunk]]:
    handles = [handle() for _ in range(CHUNKS)]
    chunks = []
    for i in range(CHUNKS):
        chunk = Chunk(Link("peer"))
        chunk.add(i, handles[i], ARENA.address + i * 64, 0)
        chunks.append(chunk)
    reasons: list[Reason | None] = [Reason.KV_TRANSFER_TIMEOUT] * CHUNKS
    batch = Batch(ARENA, handles, [i * 64 for i in range(CHUNKS)], reasons, chunks, None, late_settled.append)
    return batch, chunks


@given(st.lists(STEP, max_size=20))
@settings(max_examples=300, deadline=None)
def test_late_is_exactly_what_may_still_come(steps: list[tuple[str, int]]) -> None:
    asyncio.run(run(steps))


async def run(steps: list[tuple[str, int]]) -> None:
    told: list[Chunk] = []
    batch, chunks = batch_of(told)
    late: list[Chunk] | None = None
    over: list[Chunk] = []
    good: set[int] = set()
    bad: set[int] = set()
    for what, i in steps:
        chunk = chunks[i]
        if what == "abandon" and late is None:
            expected = [c for c in chunks if c.state is State.POSTED]
            late = batch.abandon()
            assert late == expected
        elif what == "begin" and chunk.state is State.WAITING:
            assert chunk.begin() == (late is None)  # what nobody waits for is never posted
        elif what in ("settle", "fail") and chunk.state is State.POSTED:
            chunk.settle(None if what == "settle" else "broken")
            if late is not None:
                over.append(chunk)
            else:
                (good if what == "settle" else bad).add(i)
    await asyncio.sleep(0)
    assert told == over  # each late chunk is reported once, the others never
    assert set(over) <= set(late or [])
    for i in range(CHUNKS):
        expected_reason = None if i in good else Reason.KV_TRANSFER_FAILED if i in bad else Reason.KV_TRANSFER_TIMEOUT
        assert batch.reasons[i] is expected_reason
    assert batch.done.done() == (len(good | bad) == CHUNKS)


RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=8)


@given(RANGES)
def test_collisions_are_all_overlaps(ranges: list[tuple[int, int]]) -> None:
    handles = [handle(length) for _, length in ranges]
    into = [offset for offset, _ in ranges]
    cells = [set(range(offset, offset + length)) for offset, length in ranges]
    expected = {i for i in range(len(ranges)) if any(i != j and cells[i] & cells[j] for j in range(len(ranges)))}
    assert collisions(handles, into) == expected


@given(RANGES, st.integers(0, 50), st.integers(1, 12))
def test_quarantine_touches_what_overlaps(ranges: list[tuple[int, int]], offset: int, length: int) -> None:
    quarantine = Quarantine()
    taken: dict[int, int] = {}
    for start, size in ranges:
        if not quarantine.touches(start, size):
            quarantine.add(start, size)
            taken[start] = size
    cells = {cell for start, size in taken.items() for cell in range(start, start + size)}
    assert quarantine.touches(offset, length) == bool(cells & set(range(offset, offset + length)))
    assert quarantine.offsets() == set(taken)
    for start in taken:
        quarantine.release(start)
    assert not quarantine
