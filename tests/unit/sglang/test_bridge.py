"""Calls from threads into the loop: answered, refused, given up; what comes late goes to `discard`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from baton.engine.sglang.bridge import Bridge

HANG_S = 30.0


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    bridge = Bridge("test")
    yield bridge
    bridge.close()


async def echo(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_answers_and_errors_come_back(bridge: Bridge) -> None:
    async def broken() -> None:
        raise KeyError("why")

    assert bridge.call(echo(3), HANG_S) == 3
    with pytest.raises(KeyError, match="why"):
        bridge.call(broken(), HANG_S)


def test_threads_do_not_wait_for_one_another(bridge: Bridge) -> None:
    gate = asyncio.Event()
    results: list[int] = []

    async def waits() -> int:
        await gate.wait()
        return 1

    waiting = threading.Thread(target=lambda: results.append(bridge.call(waits(), HANG_S)))
    waiting.start()
    assert bridge.call(echo(2), HANG_S) == 2
    bridge.post(gate.set)
    waiting.join(HANG_S)
    assert results == [1]


def test_a_call_that_is_given_up_is_cancelled(bridge: Bridge) -> None:
    ended = threading.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match=r"no answer from Baton's thread in 0.01 s"):
        bridge.call(hangs(), 0.01)
    assert ended.wait(HANG_S)


def test_what_comes_after_all_is_not_lost(bridge: Bridge) -> None:
    discarded: list[int] = []
    done = threading.Event()

    async def stubborn() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7  # it had the result just as it was given up
        return 0

    def discard(value: int) -> None:
        discarded.append(value)
        done.set()

    with pytest.raises(TimeoutError):
        bridge.call(stubborn(), 0.01, discard)
    assert done.wait(HANG_S)
    assert discarded == [7]


def test_close_is_idempotent() -> None:
    bridge = Bridge("closing")
    bridge.close()
    bridge.close()
    assert bridge.loop.is_closed()
