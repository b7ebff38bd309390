"""Who holds which block: key -> set of sources, bounded, fed by one ordered event stream for each source.

A source is a worker, or a KV store whose blocks lie on tiers. Sources are bits of an integer, so a prefix walk is one
look-up and one comparison for each run of keys that were told together, however many keys the index holds. A store has
one bit for "somewhere" and one for each tier (places.py). A stream is trusted only while its sequence numbers follow
each other: after a gap or in a new epoch everything known of that source is dropped at once, because a wrong hit costs
more than a lost one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.kv.keys import KEY_BYTES, split_keys
from services.router.places import Places

TIERS = ("host", "device", "nvme")
"""Best first: readers READ host memory, so a store's device blocks come up through it like those of its disk. A tier of
another name counts as slower than all of these."""


@dataclass(slots=True)
class _Source:
    bit: int
    epoch: int | None = None
    seq: int = 0
    tiers: dict[str, int] = field(default_factory=dict)  # bit by tier, best first; empty for a worker


@dataclass(slots=True)
class Found:
    """The prefix of a request, as far as sources hold it; never changed once handed out.

    `workers`: keys from the first on without a hole, by worker. `stores`: the same by store, parted by tier: a block
    that lies on several counts at the best, and the numbers of a store sum to its run.
    """

    workers: dict[str, int]
    stores: dict[str, dict[str, int]]


class PrefixIndex:
    """At most `max_keys` keys; beyond that those are forgotten that were told or asked for the longest ago (`dropped`
    counts them)."""

    def __init__(self, max_keys: int) -> None:
        self._places = Places(max_keys)
        self._sources: dict[str, _Source] = {}
        self.gaps = 0

    def __len__(self) -> int:
        """How many different keys are known."""
        return len(self._places)

    @property
    def dropped(self) -> int:
        """Keys forgotten at the bound."""
        return self._places.dropped

    def held_by(self, source: str) -> int:
        """How many keys of `source` are known."""
        known = self._sources.get(source)
        return self._places.count(known.bit) if known else 0

    def holds(self, source: str, key: bytes) -> bool:
        """Whether `source` is known to hold `key`."""
        known = self._sources.get(source)
        return known is not None and bool(self._places.of(key) & known.bit)

    def exact(self, source: str) -> bool:
        """Whether the source's entries follow an unbroken stream."""
        known = self._sources.get(source)
        return known is not None and known.epoch is not None

    def apply(
        self,
        source: str,
        epoch: int,
        seq: int,
        *,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        cleared: bool,
        tier: str = "",
    ) -> bool:
        """Take one event. False means a gap: the source's entries are gone and its stream must be opened anew.

        `cleared` starts the source over, all its tiers (a snapshot's first event); any other event must carry the
        epoch and the next number. Numbers count the source's events, whatever their tier. `tier` is where the keys of
        this event lie; empty for a worker. Raises ValueError when a key is not of `KEY_BYTES`: the stream cannot be
        believed then, and whoever reads it forgets the source.
        """
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = _Source(self._places.new_bit(source))
        if cleared:
            self._empty(known)
            known.epoch = epoch
        elif known.epoch != epoch or seq != known.seq + 1:
            self._empty(known)
            known.epoch = None
            self.gaps += 1
            return False
        known.seq = seq
        if not tier:
            self._places.remove(known.bit, removed)
            self._places.add(known.bit, stored)
            return True
        if tier not in known.tiers:
            known.tiers[tier] = self._places.new_bit()
            known.tiers = dict(sorted(known.tiers.items(), key=lambda item: _rank(item[0])))
        bit = known.tiers[tier]
        self._places.remove(bit, removed)
        others = sum(b for b in known.tiers.values() if b != bit)
        self._places.remove(known.bit, [key for key in removed if not self._places.of(key) & others])
        self._places.add(bit | known.bit, stored)
        return True

    def forget(self, source: str) -> None:
        """Drop everything about `source`."""
        known = self._sources.pop(source, None)
        if known is not None:
            for bit in (known.bit, *known.tiers.values()):
                self._places.free_bit(bit)

    def prefix(self, keys: bytes) -> dict[str, int]:
        """For each worker that holds the first of the packed `keys`: how many it holds from there on without a hole."""
        return self.look_up(keys).workers

    def look_up(self, keys: bytes) -> Found:
        """For each source that holds the first of `keys`: its run from there on, in one walk over them. They lie side
        by side, `KEY_BYTES` each. Raises ValueError when the last is shorter."""
        found = Found({}, {})
        for depth, mask in self._places.runs(keys):
            for name in self._places.names(mask):
                tiers = self._sources[name].tiers
                if tiers:
                    found.stores[name] = self._by_tier(tiers, split_keys(keys[: depth * KEY_BYTES]))
                else:
                    found.workers[name] = depth
        return found

    def check_integrity(self) -> list[str]:
        """Findings in words: both directions of the index must say the same, and bounds must hold."""
        owners = {source.bit: name for name, source in self._sources.items()}
        findings = self._places.check_integrity(owners, {b for s in self._sources.values() for b in s.tiers.values()})
        for name, source in self._sources.items():
            if source.epoch is None and self._places.count(source.bit):
                findings.append(f"index: {self._places.count(source.bit)} keys of {name} survive a gap")
            if source.tiers:
                somewhere = self._places.keys(source.bit)
                if somewhere != set().union(*(self._places.keys(bit) for bit in source.tiers.values())):
                    findings.append(f"index: tiers of {name} do not add up")
        return findings

    def _empty(self, source: _Source) -> None:
        for bit in (source.bit, *source.tiers.values()):
            self._places.clear(bit)

    def _by_tier(self, tiers: dict[str, int], keys: Sequence[bytes]) -> dict[str, int]:
        counts = dict.fromkeys(tiers, 0)
        for key in keys:
            mask = self._places.of(key)
            for tier, bit in tiers.items():
                if mask & bit:
                    counts[tier] += 1
                    break
        return {tier: count for tier, count in counts.items() if count}


def _rank(tier: str) -> tuple[int, str]:
    return (TIERS.index(tier) if tier in TIERS else len(TIERS), tier)
