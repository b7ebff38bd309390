"""Bounce slots: each is free, taken or aside, and one that a late read may write to is nobody's."""

from __future__ import annotations

import asyncio

import pytest

from baton.engine.sglang.bounce import Bounce

HANG_S = 30.0


async def test_slots_are_taken_and_given_back() -> None:
    bounce = Bounce(4, 100, frozenset)
    first = await bounce.take(3)
    assert first == [0, 100, 200]
    assert await bounce.take(9) == [300]
    assert bounce.free == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bounce.take(1)
    waiting = asyncio.create_task(bounce.take(2))
    await asyncio.sleep(0)
    bounce.give_back(first)
    assert len(await asyncio.wait_for(waiting, HANG_S)) == 2
    assert bounce.free == 1


async def test_a_late_slot_stays_aside_until_it_is_over() -> None:
    late: set[int] = set()
    bounce = Bounce(2, 10, lambda: frozenset(late))
    slots = await bounce.take(2)
    late.add(10)
    bounce.give_back(slots)
    assert (bounce.free, bounce.aside) == (1, 1)
    assert await bounce.take(2) == [0]
    waiting = asyncio.create_task(bounce.take(1))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    late.clear()  # nobody tells: it looks again
    assert await asyncio.wait_for(waiting, HANG_S) == [10]
    bounce.give_back([0, 10])
    assert (bounce.free, bounce.aside) == (2, 0)


async def test_nothing_given_back_is_nothing_asked() -> None:
    def asked() -> frozenset[int]:
        raise AssertionError("no late read can matter")

    Bounce(1, 1, asked).give_back([])
