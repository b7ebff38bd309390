"""Write-behind: copies of host blocks into the tiers below, one at a time, behind everybody's back.

Keys wait in line without a pin: what leaves the host before its turn is not written. A block that would have to leave
and is worth keeping (demotion) is pinned and goes to the head of the line; it leaves when it is below. An eighth of the
host's slots may be pinned in this way; what comes beyond that leaves at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

import structlog

from baton.errors import BatonError
from services.kvstore.host import HostTier
from services.kvstore.slots import Entry
from services.kvstore.tier import Tier

MAX_WAITING = 8192
"""Keys in line."""

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
        self._line: OrderedDict[bytes, None] = OrderedDict()
        self._leaving: dict[bytes, Entry] = {}
        self._writing: Entry | None = None
        self._news = asyncio.Event()

    @property
    def open(self) -> int:
        """Blocks that wait or are being written."""
        return len(self._line) + (self._writing is not None)

    @property
    def pins(self) -> int:
        """How many of them it holds in place."""
        return len(self._leaving) + (self._writing is not None)

    def want(self, key: bytes) -> None:
        """Write the block below when its turn comes. Nothing to do when it is there."""
        if key in self._line or not self._missing_below(key):
            return
        if len(self._line) >= MAX_WAITING:
            self._count("full")
            return
        self._line[key] = None
        self._news.set()

    def demote(self, key: bytes) -> bool:
        """Write the block now, then let it leave the host. False when it is to leave without."""
        entry = self._host.entry(key)
        if entry is None or not self._missing_below(key):
            return False
        if len(self._leaving) >= max(1, self._host.slots // 8):
            self._count("no_time")
            return False
        if stale := self._leaving.get(key):  # dropped meanwhile, and the key came in anew
            self._host.unpin([stale], used=False)
        self._host.hold(entry)
        self._leaving[key] = entry
        self._line[key] = None
        self._line.move_to_end(key, last=False)
        self._news.set()
        return True

    async def run(self) -> None:
        """Write for ever."""
        while True:
            while self._line:
                key, _ = self._line.popitem(last=False)
                entry = self._leaving.pop(key, None)
                leaves = entry is not None
                if entry is None and (entry := self._host.entry(key)) is not None:
                    self._host.hold(entry)
                if entry is not None:
                    await self._copy(entry, leaves)
                else:
                    self._count("left")
            self._news.clear()
            await self._news.wait()

    async def _copy(self, entry: Entry, leaves: bool) -> None:
        self._writing = entry
        try:
            await self._write(entry)
        except BatonError as error:  # not one such block fits below
            self._count("too_large")
            _log.warning("write-behind", error=str(error))
        except Exception:
            self._count("failed")
            _log.exception("write-behind")
        finally:
            self._writing = None
            key = entry.handle.key
            leaves = leaves and entry.pins == 1 and self._host.entry(key) is entry
            self._host.unpin([entry], used=False)
            if leaves:
                self._host.drop([key])
                self._host.on_gone([key], "capacity")

    async def _write(self, entry: Entry) -> None:
        key, shape = entry.handle.key, self._host.shape
        if entry.facts.expired() or shape is None:
            return
        if not await asyncio.to_thread(self._host.intact, entry):
            await self._host.verify(key)  # drops it
            return
        for tier in self._below:
            if entry.condemned:  # cleared, and so it is below
                return
            tier.fix(shape)
            new = not tier.holds(key)
            if await tier.store(key, self._host.view(entry.slot), entry.facts) and new and not entry.condemned:
                self._on_stored(tier, key)
                if not tier.speed.latency_s:
                    await tier.verify(key)  # the first block is read back: so the tier's speed is known

    def _missing_below(self, key: bytes) -> bool:
        return self._host.holds(key) and not all(tier.holds(key) for tier in self._below)
