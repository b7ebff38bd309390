"""Watching the store: a snapshot, then every change, numbered; a slow watcher gets a snapshot instead of a hole."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from services.kvstore.events import Change, Events

WAIT = 20


async def test_snapshot_then_changes_without_a_hole() -> None:
    here = [b"a"]
    events = Events(lambda: [Change(stored=tuple(here), cleared=True)])
    async with aclosing(events.watch()) as changes:
        assert await anext(changes) == (1, Change(stored=(b"a",), cleared=True))
        events.publish(Change(stored=(b"b",)))
        events.publish(Change(removed=(b"a",)))
        assert await anext(changes) == (2, Change(stored=(b"b",)))
        assert await anext(changes) == (3, Change(removed=(b"a",)))
        assert events.watchers == 1
    assert events.watchers == 0


async def test_a_waiting_watcher_is_woken_and_a_cancelled_one_leaves() -> None:
    events = Events(lambda: [Change(cleared=True)])
    seen: asyncio.Queue[tuple[int, Change]] = asyncio.Queue()

    async def follow() -> None:
        async with aclosing(events.watch()) as changes:
            async for item in changes:
                seen.put_nowait(item)

    task = asyncio.create_task(follow())
    async with asyncio.timeout(WAIT):
        await seen.get()
        events.publish(Change(stored=(b"x",)))
        assert await seen.get() == (2, Change(stored=(b"x",)))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert events.watchers == 0


async def test_a_watcher_that_falls_behind_starts_over_with_what_is_here() -> None:
    here: list[bytes] = []
    overflows: list[None] = []
    events = Events(lambda: [Change(stored=tuple(here), cleared=True)], 3, lambda: overflows.append(None))
    async with aclosing(events.watch()) as changes:
        await anext(changes)
        for number in range(10):
            here.append(bytes([number]))
            events.publish(Change(stored=(bytes([number]),)))
        assert await anext(changes) == (2, Change(stored=tuple(here), cleared=True))
        events.publish(Change(removed=(b"z",)))
        assert await anext(changes) == (3, Change(removed=(b"z",)))
    assert len(overflows) == 1


async def test_a_snapshot_has_every_tier_and_news_of_speeds_take_no_number() -> None:
    snapshot = [Change(stored=(b"a",), cleared=True), Change("nvme", stored=(b"a", b"b"))]
    events = Events(lambda: snapshot)
    async with aclosing(events.watch()) as changes:
        assert await anext(changes) == (1, snapshot[0])
        events.publish(Change(speeds=True))
        assert await anext(changes) == (2, snapshot[1])
        assert await anext(changes) == (2, Change(speeds=True))
        events.publish(Change(alive=True))
        events.publish(Change("nvme", removed=(b"b",)))
        assert await anext(changes) == (2, Change(alive=True))
        assert await anext(changes) == (3, Change("nvme", removed=(b"b",)))


async def test_heartbeats_do_not_pile_up_behind_what_waits() -> None:
    """A watcher that does not read is no further behind because time goes by, nor one whose snapshot is a long one."""
    snapshot = [Change(stored=(b"a",), cleared=True), *(Change("nvme", stored=(bytes([n]),)) for n in range(8))]
    overflows: list[None] = []
    events = Events(lambda: snapshot, 3, lambda: overflows.append(None))
    async with aclosing(events.watch()) as changes:
        for number, told in enumerate(snapshot, 1):
            assert await anext(changes) == (number, told)
            events.publish(Change(alive=True))
        for _ in range(5):
            events.publish(Change(alive=True))
        assert await anext(changes) == (9, Change(alive=True))
        events.publish(Change(removed=(b"a",)))
        assert await anext(changes) == (10, Change(removed=(b"a",)))
    assert not overflows
