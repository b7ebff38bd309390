"""How long a peer may say nothing, in time as this process lives it.

A plain timeout that fires in a loop which was itself late judges the peer by what has not been read yet. Patience is
counted in ticks of the loop: a tick that came late does not count, so everything that arrived meanwhile is read first.
"""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType

TICK_S = 0.2
"""Of counting; a tick that is late by as much again says that the loop was busy or the process stopped."""


class Patience:
    """`async with Patience(s) as patience`: raises TimeoutError when the body neither ends nor calls `heard` for `s`.

    As exact as a tick. `s` is None: for ever, until `heard` says otherwise.
    """

    def __init__(self, seconds: float | None) -> None:
        self._left = _ticks(seconds)
        self._timeout = asyncio.timeout(None)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def heard(self, seconds: float | None) -> None:
        """The peer said something: it may be silent for `seconds` from now."""
        self._left = _ticks(seconds)

    async def __aenter__(self) -> Patience:
        await self._timeout.__aenter__()
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _arm(self) -> None:
        # All of a process tick at the same moments: it wakes up once for all of them. A timer may be early by a little.
        now = time.monotonic()
        self._due = max(self._due, math.floor(now / TICK_S) * TICK_S) + TICK_S
        self._timer = asyncio.get_running_loop().call_later(self._due - now, self._tick)

    def _tick(self) -> None:
        if time.monotonic() - self._due < TICK_S:
            self._left -= 1
        if self._left > 0:
            self._arm()
        else:
            self._timeout.reschedule(asyncio.get_running_loop().time())


def _ticks(seconds: float | None) -> float:
    """The first tick comes at once or a tick later, so there is one more."""
    return math.inf if seconds is None else max(1, math.ceil(seconds / TICK_S)) + 1
