"""Doing a fault to a running stack, and undoing it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.faults.suite.link import Link, Weather
from tests.faults.suite.load import Load
from tests.faults.suite.schedule import NETWORK, Fault, Kind
from tests.faults.suite.stack import FaultStack
from tests.integration.stack import until

DRAIN_HANG_S = 60.0
_WEATHER = {
    Kind.CUT: Weather(cut=True),
    Kind.DELAY: Weather(delay_s=0.15),
    Kind.THROTTLE: Weather(bytes_s=200_000),
    Kind.LOSS: Weather(loss=0.1),
    Kind.CORRUPT: Weather(corrupt=True),
}


@dataclass(frozen=True)
class Done:
    """A fault that was done: from when to when its places were ill (`time.monotonic()`)."""

    fault: Fault
    places: Sequence[str]
    began: float
    ended: float


class Injector:
    """Does the faults of a schedule in its order; several targets may be ill at once, never all that a stream needs."""

    def __init__(self, stack: FaultStack, load: Load, link: Link | None, say: Callable[[str], None]) -> None:
        self.done: list[Done] = []
        self.flipped = 0
        self._stack, self._load, self._link, self._say = stack, load, link, say
        self._ill: dict[str, float] = {}
        self._was_ill: list[tuple[str, float, float]] = []
        self._undoing: set[asyncio.Task[None]] = set()

    def was_ill(self, name: str, since: float) -> bool:
        """Whether `name` was broken, or being started again, at any time after `since`."""
        return name in self._ill or any(n == name and end >= since for n, _, end in self._was_ill)

    async def run(self, faults: list[Fault], until: float = math.inf) -> None:
        """Do them all, or those that there is time for `until` then (`time.monotonic()`); returns when all are undone.
        Raises what a fault or its end raised."""
        late = time.monotonic()
        try:
            for fault in faults:
                if time.monotonic() >= until:
                    break
                await asyncio.sleep(max(0.0, late + fault.at_s - time.monotonic()))
                while not self._may(fault):
                    await self._reap(0.05)
                await self._do(fault)
                # Those that follow keep their distance: two at once are for those that a client meets by chance.
                late = max(late, time.monotonic() - fault.at_s)
                await self._reap(0.0)
        finally:
            while self._undoing:
                await self._reap(1.0)

    async def _reap(self, wait_s: float) -> None:
        """Wait a little for whatever is being undone; its failure is ours."""
        if not self._undoing:
            await asyncio.sleep(wait_s)
            return
        done, _ = await asyncio.wait(self._undoing, timeout=wait_s)
        self._undoing -= done
        for task in done:
            task.result()

    def _places(self, fault: Fault) -> list[str]:
        """What is ill meanwhile."""
        return list(self._stack.far) if fault.kind in NETWORK else [fault.target]

    def _may(self, fault: Fault) -> bool:
        if fault.kind is Kind.FLIP:
            return not self._ill
        places = self._places(fault)
        if any(place in self._ill for place in places):
            return False
        ill = set(self._ill) | set(places)
        need = [self._stack.workers("decode", "merged"), self._stack.of_role("frontend")]
        return all(set(group) - ill for group in need) and not (
            fault.kind is Kind.LEADER and any(name.startswith("etcd") for name in self._ill)
        )

    async def _do(self, fault: Fault) -> None:
        self._say(str(fault))
        began = time.monotonic()
        for place in self._places(fault):
            self._ill[place] = began
        undo = await self._begin(fault)
        task = asyncio.create_task(self._undo(fault, began, undo), name=str(fault))
        self._undoing.add(task)

    async def _undo(self, fault: Fault, began: float, undo: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(fault.for_s)
        await undo()
        ended = time.monotonic()
        places = self._places(fault)
        for place in places:
            del self._ill[place]
            self._was_ill.append((place, began, ended))
        self.done.append(Done(fault, places, began, ended))

    async def _begin(self, fault: Fault) -> Callable[[], Awaitable[None]]:
        """Do it; what is returned undoes it."""
        stack, name = self._stack, fault.target

        async def nothing() -> None:
            return

        match fault.kind:
            case Kind.KILL | Kind.RESTART:
                await asyncio.to_thread(stack.kill, name)
                return lambda: self._start(name)
            case Kind.TERM:
                stack.terminate(name)
                return lambda: self._left(name)
            case Kind.STOP:
                stack.stop(name)
                return lambda: self._continue(name)
            case Kind.FREEZE:
                stack.freeze(name)
                return lambda: self._continue(name)
            case Kind.COMPACT:
                await asyncio.to_thread(stack.members.compact)
                return nothing
            case Kind.LEADER:
                member = await asyncio.to_thread(stack.members.leader)
                member.kill()
                return lambda: asyncio.to_thread(lambda: stack.members.start() and None)
            case Kind.FLIP:
                # Blocks that somebody writes now have no checksum yet: only a pool at rest can be put to the test.
                await self._load.pause()
                await asyncio.to_thread(stack.settle)
                self.flipped += await asyncio.to_thread(stack.flip, name, fault.number)
                self._load.go_on()
                return nothing
        assert self._link is not None
        self._link.weather = _WEATHER[fault.kind]
        return self._clear

    async def _clear(self) -> None:
        assert self._link is not None
        self._link.weather = Weather()
        await self._usable(self._stack.far)

    async def _start(self, name: str) -> None:
        await asyncio.to_thread(lambda: self._stack.launch(name).wait_ready())
        await self._usable([name])

    async def _left(self, name: str) -> None:
        code = await asyncio.to_thread(self._stack.processes[name].process.wait, DRAIN_HANG_S)
        assert code == 0, f"{name} left with {code}:\n{self._stack.log(name)}"
        await self._start(name)

    async def _continue(self, name: str) -> None:
        self._stack.cont(name)
        await self._usable([name])

    async def _usable(self, names: list[str]) -> None:
        """Wait until the routers have these workers in service again."""
        workers = [name for name in names if name in self._stack.workers()]
        await asyncio.to_thread(
            until, lambda: all(map(self._stack.in_service, workers)), lambda: f"{names} are not back"
        )
