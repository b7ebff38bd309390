"""The tiers as one store: where a block is, what comes and goes, and who is told.

Blocks come in through the host and are copied below by write-behind (`writeback.py`); they come up again for look-ups
(`promotion.py`). Every change of a tier is an event with the tier's name. A tier that could not be had at start stays
known by its name and the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import structlog

from baton.errors import BatonError, Reason
from baton.rpc.tasks import Background
from services.kvstore.events import Change, Events
from services.kvstore.expiry import Expiry
from services.kvstore.host import HostTier
from services.kvstore.layout_use import LayoutUse
from services.kvstore.metrics import KvStoreMetrics
from services.kvstore.promotion import Hold, Promotions
from services.kvstore.sightings import APART_S, Sightings
from services.kvstore.slots import Entry
from services.kvstore.tier import BlockShape, Facts, Tier, TierStats, Verdict
from services.kvstore.writeback import Writeback

SPEED_CHANGE = 1.25
"""A tier's speed is told anew when it has changed by this factor."""

FORGET_AGAIN_S, FORGET_AGAIN_MAX_S = 0.02, 1.0
"""Pauses of what waits until a disk can forget."""

SNAPSHOT_KEYS = 16_384
"""Keys in one event of a snapshot: 300 kB of a message."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class Listed:
    """One block, for people."""

    key: bytes
    tenant: str
    tiers: tuple[str, ...]
    pins: int
    idle_s: float
    ttl_s: float


@dataclass(frozen=True)
class Verified:
    """How far a verification is, in blocks. `checked` are all that it has come to, the failed and the unreadable ones
    too."""

    checked: int
    total: int
    failed: int
    unreadable: int


class Store:
    """`below` are the lower tiers, fastest first; `missing` those that were asked for and could not be had."""

    def __init__(
        self,
        host: HostTier,
        below: Sequence[Tier],
        missing: Sequence[TierStats],
        background: Background,
        metrics: KvStoreMetrics,
        ttl_s: float = 0.0,
        layout_rest_s: float = 3600.0,
    ) -> None:
        self.host = host
        self.below = tuple(below)
        self.missing = tuple(missing)
        self.events = Events(self._snapshot, overflowed=metrics.overflows.inc)
        self.evicted: Counter[str] = Counter()
        self.promotions = Promotions(host, below, background, self._stored_one, metrics.promoted)
        self.writeback = Writeback(host, below, self._stored_one, metrics.not_written)
        self._background = background
        self._forgetting: asyncio.Task[None] | None = None
        self._metrics = metrics
        self._ttl_s = ttl_s
        self._use = LayoutUse(layout_rest_s)
        self._sightings = Sightings()
        self._expiry = Expiry()
        self._told: dict[str, TierStats] = {}
        host.keep = lambda key: bool(self.below) and self._sightings.twice(key) and self.writeback.demote(key)
        for tier in self.tiers:
            self._listen(tier)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Fastest first."""
        return (self.host, *self.below)

    @property
    def shape(self) -> BlockShape | None:
        """What blocks look like in this store: what is readable decides, else what is, or may be, below."""
        return self.host.shape or next((tier.shape for tier in self.below if tier.occupied), None)

    @property
    def fingerprint(self) -> str:
        """The layout of what is here; empty: any may come."""
        return self.shape.fingerprint if self.shape else ""

    def stats(self) -> list[TierStats]:
        """Every tier that was asked for."""
        return [*(tier.stats() for tier in self.tiers), *self.missing]

    # ---- in

    def fix(self, shape: BlockShape) -> None:
        """Blocks of this shape come in. Raises BatonError: KV_LAYOUT_MISMATCH (also for what lies only below, from an
        earlier life), NO_CAPACITY."""
        self.asked(shape.fingerprint)
        for tier in self.below:
            if tier.occupied and tier.shape != shape:
                text = f"this store's {tier.name} holds {tier.shape}, offered is {shape}"
                raise BatonError(Reason.KV_LAYOUT_MISMATCH, text)
        self.host.fix(shape)

    def asked(self, fingerprint: str) -> None:
        """Somebody with this layout has called."""
        self._use.asked(fingerprint, self.fingerprint)

    def facts(self, tenant: str, ttl_s: float) -> Facts:
        """What goes with a tenant's block that comes in now; `ttl_s` 0 is the store's own."""
        ttl_s = ttl_s or self._ttl_s
        return Facts(tenant, time.time() + ttl_s if ttl_s > 0 else 0.0)

    def stored(self, keys: Sequence[bytes], facts: Facts) -> None:
        """These, a prompt in order, were sealed in the host."""
        for key in keys:
            self._expiry.note(key, facts.expires)
        self._wanted(keys)
        self.events.publish(Change(stored=tuple(keys)))

    def known(self, keys: Sequence[bytes]) -> None:
        """These were offered and are here: somebody has use for them, if not the one who offered them just before."""
        self.host.touch(keys)
        self._wanted(keys, APART_S)

    # ---- out

    def pin(self, hold: Hold, keys: Sequence[bytes], fingerprint: str) -> list[Entry]:
        """The longest prefix that can be read now, pinned in `hold`."""
        self.asked(fingerprint)
        found = hold.pin(keys, fingerprint)
        self._wanted([entry.handle.key for entry in found])
        return found

    def bring(self, keys: Sequence[bytes], fingerprint: str, hold: Hold | None) -> int:
        """Bring up what follows from below, at most what half of the host holds; how many blocks are coming."""
        self.asked(fingerprint)
        if keys and self.host.shape is None:
            for tier in self.below:
                if tier.shape is not None and tier.shape.fingerprint == fingerprint and tier.holds(keys[0]):
                    self.host.fix(tier.shape)
                    break
        return self.promotions.bring(keys[: self.host.slots // 2], fingerprint, hold)

    # ---- gone

    def clear(self, fingerprint: str = "", tenant: str = "", reason: str = "cleared") -> int:
        """Forget every block, or those of one layout or tenant, also what is on its way; how many. Whatever becomes of
        the caller, the store goes on until the disk has forgotten too: see `forgotten`. `reason` is for the counter."""
        tiers = [tier for tier in self.tiers if not fingerprint or _layout(tier) == fingerprint]
        if not tiers:
            return 0
        all_goes = not tenant and not any(tier.occupied for tier in self.tiers if tier not in tiers)
        gone: set[bytes] = set()
        for tier in tiers:
            keys = tier.clear(tenant)
            gone.update(keys)
            if keys and not all_goes:
                self.events.publish(Change(tier.name, removed=tuple(keys)))
        if all_goes:
            self.events.publish(Change(cleared=True))
        self._count_gone(reason, len(gone))
        self.host.shape_changed.set()
        if self._forgetting is None or self._forgetting.done():
            self._forgetting = self._background.spawn(self._forget(), "forget what was cleared")
        return len(gone)

    def give_way(self, registered: Iterable[str]) -> None:
        """Start anew when nobody has use for the layout that is here and somebody has come with another one:
        `registered` are the workers' layouts."""
        ours = self.fingerprint
        if other := self._use.successor(ours, registered):
            blocks = self.clear(ours, reason="layout")
            _log.warning(
                "nobody uses the layout of these blocks: starting anew", layout=ours, other=other, blocks=blocks
            )

    async def forgotten(self, within_s: float) -> bool:
        """Whether nothing that was cleared could come back with a restart; waits for it at most so long."""
        if self._forgetting is not None:
            await asyncio.wait((self._forgetting,), timeout=max(0.0, within_s))
        return not any(tier.dirty for tier in self.below)

    def expire(self) -> int:
        """Drop blocks whose time is over; how many."""
        due = self._expiry.due(time.time())
        gone: set[bytes] = set()
        for tier in self.tiers if due else ():
            over = [key for key in due if (placed := tier.placed(key)) and placed.facts.expired()]
            if keys := tier.drop(over):
                gone.update(keys)
                self.events.publish(Change(tier.name, removed=tuple(keys)))
        self._count_gone("expired", len(gone))
        if len(self._expiry) > 1000 + 2 * sum(tier.stats().blocks for tier in self.tiers):
            self._expiry.keep(set(self._every_key()))
        return len(gone)

    # ---- for people

    def listed(self, tenant: str) -> Iterator[Listed]:
        """Every block (of a tenant, when named)."""
        now = time.time()
        for key in dict.fromkeys(self._every_key()):
            places = {tier.name: placed for tier in self.tiers if (placed := tier.placed(key))}
            first = next(iter(places.values()), None)
            if first is None or (tenant and first.facts.tenant != tenant):
                continue
            left = max(0.001, first.facts.expires - now) if first.facts.expires else 0.0
            pins = sum(place.pins for place in places.values())
            idle = min(place.idle_s for place in places.values())
            yield Listed(key, first.facts.tenant, tuple(places), pins, idle, left)

    async def verify(self) -> AsyncGenerator[Verified, None]:
        """Read and check every block of every tier, one at a time; how far it is after each."""
        work = [(tier, tier.keys()) for tier in self.tiers]
        total, found = sum(len(keys) for _, keys in work), Counter[Verdict]()
        yield Verified(0, total, 0, 0)
        for tier, keys in work:
            for key in keys:
                found[await tier.verify(key)] += 1
                yield Verified(found.total(), total, found[Verdict.BAD], found[Verdict.UNREADABLE])

    def tell_speeds(self) -> None:
        """Publish when a tier's speed or state is no longer the one that was told last."""
        now = {stats.name: stats for stats in self.stats()}
        if any(_differs(now[name], self._told.get(name)) for name in now):
            self._told = now
            self.events.publish(Change(speeds=True))

    def check_integrity(self) -> list[str]:
        """Findings of every tier."""
        return [finding for tier in self.tiers for finding in tier.check_integrity()]

    # ---- within

    def _wanted(self, keys: Sequence[bytes], apart_s: float = 0.0) -> None:
        for key in keys:
            if self._sightings.sight(key, apart_s) and self.below:
                self.writeback.want(key)

    def _stored_one(self, tier: Tier, key: bytes) -> None:
        if placed := tier.placed(key):
            self._expiry.note(key, placed.facts.expires)
            self.events.publish(Change(tier.name, stored=(key,)))

    def _listen(self, tier: Tier) -> None:
        lower = self.tiers[self.tiers.index(tier) + 1 :]

        def gone(keys: list[bytes], reason: str) -> None:
            for key in keys:
                still = reason in ("capacity", "quota") and any(other.holds(key) for other in lower)
                self._count_gone("demoted" if still else reason, 1)
            self.events.publish(Change(tier.name, removed=tuple(keys)))

        def found(keys: list[bytes]) -> None:
            for key in keys:
                if placed := tier.placed(key):
                    self._expiry.note(key, placed.facts.expires)
            self.events.publish(Change(tier.name, stored=tuple(keys)))
            self.host.shape_changed.set()  # the store has one, if only below

        tier.on_gone, tier.on_found = gone, found

    async def _forget(self) -> None:
        """Until every tier has made durable what was cleared: a disk may fail, late writes and the scan may have to end
        first."""
        pause, failed = FORGET_AGAIN_S, False
        while dirty := [tier for tier in self.below if tier.dirty]:
            for tier in dirty:
                try:
                    await tier.flush()
                except OSError as error:
                    if not failed:
                        _log.error("until the disk is back a restart finds cleared blocks", error=str(error))
                    failed = True
            if any(tier.dirty for tier in dirty):
                await asyncio.sleep(pause)
                pause = min(FORGET_AGAIN_MAX_S, 2 * pause)
        if failed:
            _log.info("what was cleared is forgotten")

    def _every_key(self) -> Iterator[bytes]:
        return chain.from_iterable(tier.keys() for tier in self.tiers)

    def _count_gone(self, reason: str, count: int) -> None:
        if count:
            self.evicted[reason] += count
            self._metrics.evicted.labels(reason).inc(count)

    def _snapshot(self) -> Sequence[Change]:
        changes: list[Change] = []
        for tier in self.tiers:
            keys = tier.keys()
            changes += [
                Change(tier.name, stored=tuple(keys[at : at + SNAPSHOT_KEYS]), cleared=not changes and at == 0)
                for at in range(0, max(1, len(keys)), SNAPSHOT_KEYS)
            ]
        return changes


def _layout(tier: Tier) -> str:
    return tier.shape.fingerprint if tier.shape else ""


def _differs(now: TierStats, told: TierStats | None) -> bool:
    if told is None or (now.state == "ok") != (told.state == "ok"):
        return True
    pairs = ((now.read_bytes_s, told.read_bytes_s), (now.read_latency_s, told.read_latency_s))
    return any(max(a, b) > SPEED_CHANGE * min(a, b) for a, b in pairs)
