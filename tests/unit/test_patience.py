"""Patience with a peer: counted in ticks of this process's own loop, so that its own lateness judges nobody."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from baton.rpc.patience import TICK_S, Patience

pytestmark = pytest.mark.timeout(30)


async def test_silence_ends_it_and_not_before_its_time() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Patience(5 * TICK_S):
            await asyncio.Event().wait()
    assert time.monotonic() - began > 4.5 * TICK_S


async def test_many_last_as_long_as_one() -> None:
    """Whenever they begin, and on any loop: a timer that is early by a fraction of a tick makes no tick of its own."""

    async def patient(after_s: float) -> float:
        await asyncio.sleep(after_s)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with Patience(10 * TICK_S):
                await asyncio.Event().wait()
        return time.monotonic() - began

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(patient(i * TICK_S / 7) for i in range(20)))

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        lasted = await asyncio.to_thread(lambda new=new_loop: asyncio.Runner(loop_factory=new).run(all_of_them()))
        assert min(lasted) > 9.9 * TICK_S


async def test_whoever_is_heard_is_waited_for() -> None:
    async with Patience(4 * TICK_S) as patience:
        for _ in range(8):
            await asyncio.sleep(TICK_S)
            patience.heard(4 * TICK_S)


async def test_for_ever_until_something_else_is_said() -> None:
    async def waits() -> None:
        async with Patience(None) as patience:
            await asyncio.sleep(5 * TICK_S)
            patience.heard(2 * TICK_S)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await waits()


async def test_a_loop_that_stood_still_reads_what_came_meanwhile() -> None:
    """What arrived is read in the same round in which a plain timeout would have fired, or after it."""
    ours, theirs = asyncio.Queue[int](), asyncio.get_running_loop()
    async with Patience(5 * TICK_S) as patience:
        for _ in range(3):
            await asyncio.sleep(4 * TICK_S)  # nearly over
            theirs.call_later(TICK_S / 2, ours.put_nowait, 1)
            time.sleep(10 * TICK_S)  # noqa: ASYNC251 - the loop stands still: that is the case
            await ours.get()
            patience.heard(5 * TICK_S)


async def test_a_cancellation_from_outside_is_one() -> None:
    async def waits() -> None:
        async with Patience(60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
