"""A response in the background: it goes on without its client, who may follow its events, from any of them on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from baton.errors import BatonError, Reason

LOG_BYTES = 1 << 20
CANCEL_S = 5.0
"""A run has ended so long after it was told to: it only has to close its call."""


class Log:
    """The events of one run, numbered from 0. More than `limit` bytes are not kept: the oldest go."""

    def __init__(self, limit: int = LOG_BYTES) -> None:
        self._limit = limit
        self._events: list[bytes] = []
        self._first = 0
        self._bytes = 0
        self._more = asyncio.Event()
        self.sealed = b""
        """All that is kept of them, once there come no more."""
        self.ended = False

    def add(self, events: bytes) -> None:
        """Some whole events, in order."""
        for event in events.split(b"\n\n")[:-1]:
            self._events.append(event + b"\n\n")
            self._bytes += len(event) + 2
        if self._bytes > self._limit:
            self._shorten()
        self._wake()

    def end(self) -> None:
        """There come no more."""
        self.ended = True
        self.sealed = b"".join(self._events)
        self._wake()

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """Events behind number `after`, as they come, until there are no more; pieces of several.

        Raises BatonError(INVALID_REQUEST) when the next one is not kept any more.
        """
        while True:
            if after + 1 < self._first:
                text = f"Events before number {self._first} of this response are no longer kept."
                raise BatonError(Reason.INVALID_REQUEST, text, param="starting_after")
            more, ended = self._more, self.ended
            if new := self._events[after + 1 - self._first :]:
                after = self._first + len(self._events) - 1
                yield b"".join(new)
            elif ended:
                return
            else:
                await more.wait()

    def _shorten(self) -> None:
        """Let a quarter of them go, so that it is not done for each new one."""
        dropped = 0
        while self._bytes > self._limit * 3 // 4:
            self._bytes -= len(self._events[dropped])
            dropped += 1
        del self._events[:dropped]
        self._first += dropped

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


@dataclass
class Run:
    """One run. `task`: of what makes its events."""

    log: Log = field(default_factory=Log)
    task: asyncio.Task[None] | None = None

    async def cancel(self) -> None:
        """End it, and wait until it has."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await asyncio.wait({self.task})
