"""Write-behind: copies of host blocks into the tiers below, one at a time, behind everybody's back.

A block waits for its write with a pin on it, so it cannot leave before; the line is short (an eighth of the host's
slots), so the pins never take the host's room. What finds the line full is not written now: it comes again with its
next sighting. A block that is written because it has to leave (demotion) leaves the host when it is below.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from baton.errors import BatonError
from services.kvstore.host import HostTier
from services.kvstore.slots import Entry
from services.kvstore.tier import Tier

MAX_WAITING = 256

_log = structlog.get_logger()


class Writeback:
    """`on_stored(tier, key)` is told of each copy; `count(outcome)` of what was not written, and why."""

    def __init__(
        self,
        host: HostTier,
        below: Sequence[Tier],
        on_stored: Callable[[Tier, bytes], None],
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._host = host
        self._below = below
        self._on_stored = on_stored
        self._count = count
        self._waiting: deque[Entry] = deque()
        self._taken: dict[bytes, bool] = {}
        self._news = asyncio.Event()

    @property
    def open(self) -> int:
        """Blocks that wait or are being written, each with a pin."""
        return len(self._taken)

    def want(self, key: bytes, demote: bool = False) -> bool:
        """Write the block below; `demote`: then it leaves the host. False when it is not going to be written."""
        if key in self._taken:
            self._taken[key] |= demote
            return True
        entry = self._host.entry(key)
        if entry is None or all(tier.holds(key) for tier in self._below):
            return False
        if len(self._taken) >= max(1, min(MAX_WAITING, self._host.slots // 8)):
            self._count("full")
            return False
        self._host.hold(entry)
        self._taken[key] = demote
        self._waiting.append(entry)
        self._news.set()
        return True

    async def run(self) -> None:
        """Write for ever."""
        while True:
            while self._waiting:
                entry = self._waiting.popleft()
                try:
                    await self._write(entry)
                except BatonError as error:  # not one such block fits below
                    self._count("too_large")
                    _log.warning("write-behind", error=str(error))
                except Exception:
                    self._count("failed")
                    _log.exception("write-behind")
                finally:
                    self._done(entry)
            self._news.clear()
            await self._news.wait()

    async def _write(self, entry: Entry) -> None:
        key, shape = entry.handle.key, self._host.shape
        if entry.condemned or entry.facts.expired() or shape is None:
            return
        if not await asyncio.to_thread(self._host.intact, entry):
            await self._host.verify(key)  # drops it
            return
        for tier in self._below:
            tier.fix(shape)
            new = not tier.holds(key)
            if await tier.store(key, self._host.view(entry.slot), entry.facts) and new and not entry.condemned:
                self._on_stored(tier, key)
                if not tier.speed.latency_s:
                    await tier.verify(key)  # the first block is read back: so the tier's speed is known

    def _done(self, entry: Entry) -> None:
        key = entry.handle.key
        leave = self._taken.pop(key) and entry.pins == 1 and self._host.entry(key) is entry
        self._host.unpin([entry], used=False)
        if leave:
            self._host.drop([key])
            self._host.on_gone([key], "capacity")
