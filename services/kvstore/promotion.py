"""Bringing blocks of the tiers below up into the host, where they can be read: for look-ups that wait, and ahead.

A block on its way up is loaded once, whoever wants it. A look-up's `Hold` gets its pin in the same breath in which the
block is sealed, so nothing can take it away between the two. What cannot be had is a miss, told at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.rpc.tasks import Background
from services.kvstore.host import HostTier
from services.kvstore.slots import Entry
from services.kvstore.tier import Facts, Tier

AT_ONCE = 8
"""Loads under way: enough to keep a disk's threads busy, few enough that none waits long for one."""
MAX_COMING = 4096
"""Blocks on their way up, waiting ones included."""


class Hold:
    """The pins of one look-up. After `close` nothing is pinned for it any more."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._entries: dict[bytes, Entry] = {}
        self._open = True

    @property
    def open(self) -> bool:
        """Whether it takes pins."""
        return self._open

    def __len__(self) -> int:
        return len(self._entries)

    def pin(self, keys: Sequence[bytes], fingerprint: str) -> list[Entry]:
        """The longest prefix of `keys` that can be read now, pinned."""
        found = self._host.pin(keys, fingerprint) if self._open else []
        for entry in found:
            if entry.handle.key in self._entries:
                self._host.unpin([entry])
            self._entries[entry.handle.key] = entry
        return found

    def get(self, key: bytes) -> Entry | None:
        """The pinned block of that key."""
        return self._entries.get(key)

    def keep(self, keys: Sequence[bytes]) -> None:
        """Take no more, and let go of everything but these."""
        self._open = False
        kept = {key: self._entries[key] for key in keys}
        self._host.unpin([entry for key, entry in self._entries.items() if key not in kept])
        self._entries = kept

    def close(self) -> None:
        """Let go of everything."""
        self.keep([])


@dataclass
class _Coming:
    """One block on its way up. Who waits for `done` looks into its hold then."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    holds: list[Hold] = field(default_factory=list)
    ahead: bool = False
    """Wanted ahead of any look-up."""
    up: bool = False
    """Whether it came."""


class Promotions:
    """`on_stored(tier, key)` is told of blocks that came up; `count(outcome, number)` of what did not, and why."""

    def __init__(
        self,
        host: HostTier,
        below: Sequence[Tier],
        background: Background,
        on_stored: Callable[[Tier, bytes], None],
        count: Callable[[str, int], None] = lambda outcome, number: None,
    ) -> None:
        self._host = host
        self._below = below
        self._background = background
        self._on_stored = on_stored
        self._count = count
        self._coming: dict[bytes, _Coming] = {}
        self._loading = asyncio.Semaphore(AT_ONCE)

    @property
    def open(self) -> int:
        """Blocks on their way up."""
        return len(self._coming)

    def bring(self, keys: Sequence[bytes], fingerprint: str, hold: Hold | None) -> int:
        """Bring up the longest prefix of `keys` that is below, and pin it for `hold`; how many blocks that are."""
        many = 0
        tier = None
        for key in keys:
            coming = self._coming.get(key)
            if coming is None and self._host.holds(key):
                if hold is not None and not hold.pin([key], fingerprint):
                    break
            elif coming is None:
                tier = self._where(key, fingerprint)
                if tier is None:
                    break
                if len(self._coming) >= MAX_COMING:
                    self._count("busy", 1)
                    break
                coming = self._coming[key] = _Coming()
                self._background.spawn(self._load(tier, key, coming), "promotion")
            if coming is not None:
                coming.ahead |= hold is None
                if hold is not None:
                    coming.holds.append(hold)
            many += 1
        if many > 1 and tier is not None:
            run = [self._coming[key] for key in keys[:many] if key in self._coming]
            self._background.spawn(self._time(tier, run), "time of a run")
        return many

    async def wait(self, key: bytes) -> None:
        """Until the block is up, or is not going to be."""
        if coming := self._coming.get(key):
            await coming.done.wait()

    def _where(self, key: bytes, fingerprint: str) -> Tier | None:
        for tier in self._below:
            if tier.shape is not None and tier.shape.fingerprint == fingerprint and tier.holds(key):
                return tier
        return None

    async def _load(self, tier: Tier, key: bytes, coming: _Coming) -> None:
        try:
            async with self._loading:
                if coming.ahead or any(hold.open for hold in coming.holds):
                    await self._into_host(tier, key, coming)
        finally:
            del self._coming[key]
            coming.done.set()

    async def _into_host(self, tier: Tier, key: bytes, coming: _Coming) -> None:
        placed, shape = tier.placed(key), tier.shape
        facts = placed.facts if placed else Facts()
        if placed is None or facts.expired() or shape is None or shape != self._host.shape:
            self._count("gone", 1)
            return
        slots = self._host.reserve(1, facts.tenant)
        if not slots:
            self._count("no_room", 1)
            return
        sealed = False
        try:
            if not await tier.load(key, self._host.view(slots[0])):
                self._count("not_loaded", 1)
                return
            digest = await asyncio.to_thread(self._host.sum, slots[0], key)
            sealed = True
            if not self._host.commit(slots[0], key, digest, facts):
                self._count("cleared", 1)
                return
            for hold in coming.holds:
                hold.pin([key], shape.fingerprint)
            coming.up = True
            self._count("ok", 1)
            self._on_stored(self._host, key)
        finally:
            if not sealed:
                self._host.cancel(slots[0])

    async def _time(self, tier: Tier, run: list[_Coming]) -> None:
        """How fast several blocks came up at once."""
        began = time.monotonic()
        for coming in run:
            await coming.done.wait()
        if tier.shape is not None and all(coming.up for coming in run):
            tier.speed.batch(len(run) * tier.shape.block_bytes, time.monotonic() - began)
