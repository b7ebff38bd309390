"""Which worker holds which block: key -> set of workers, bounded, fed by one ordered event stream for each worker.

Workers are bits of an integer, so a prefix walk is one dictionary look-up and one AND for each key of the request,
however many keys the index holds. A stream is trusted only while its sequence numbers follow each other: after a gap or
in a new epoch everything known of that worker is dropped at once, because a wrong hit costs more than a lost one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class _Source:
    bit: int
    epoch: int | None = None
    seq: int = 0
    keys: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """At most `max_keys` keys; beyond that the ones known longest are forgotten (`dropped` counts them)."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._places: dict[bytes, int] = {}
        self._sources: dict[str, _Source] = {}
        self._names: dict[int, str] = {}
        self.dropped = 0
        self.gaps = 0

    def __len__(self) -> int:
        """How many different keys are known."""
        return len(self._places)

    def held_by(self, worker: str) -> int:
        """How many keys of `worker` are known."""
        source = self._sources.get(worker)
        return len(source.keys) if source else 0

    def holds(self, worker: str, key: bytes) -> bool:
        """Whether `worker` is known to hold `key`."""
        source = self._sources.get(worker)
        return source is not None and key in source.keys

    def exact(self, worker: str) -> bool:
        """Whether the worker's entries follow an unbroken stream."""
        source = self._sources.get(worker)
        return source is not None and source.epoch is not None

    def apply(
        self, worker: str, epoch: int, seq: int, *, stored: Sequence[bytes], removed: Sequence[bytes], cleared: bool
    ) -> bool:
        """Take one event. False means a gap: the worker's entries are gone and its stream must be opened anew.

        `cleared` starts over (a snapshot's first event); any other event must carry the epoch and the next number.
        """
        source = self._sources.get(worker)
        if source is None:
            source = self._sources[worker] = _Source(self._free_bit())
            self._names[source.bit] = worker
        if cleared:
            self._forget(source)
            source.epoch = epoch
        elif source.epoch != epoch or seq != source.seq + 1:
            self._forget(source)
            source.epoch = None
            self.gaps += 1
            return False
        source.seq = seq
        for key in removed:
            self._remove(source, key)
        for key in stored:
            source.keys.add(key)
            self._places[key] = self._places.get(key, 0) | source.bit
        while len(self._places) > self._max_keys:
            self._drop_oldest()
        return True

    def forget(self, worker: str) -> None:
        """Drop everything about `worker`."""
        source = self._sources.pop(worker, None)
        if source is not None:
            self._forget(source)
            del self._names[source.bit]

    def prefix(self, keys: Sequence[bytes]) -> dict[str, int]:
        """For each worker that holds `keys[0]`: how many keys it holds from the first on without a hole."""
        found: dict[str, int] = {}
        if not keys:
            return found
        active = self._places.get(keys[0], 0)
        depth = 1
        while active and depth < len(keys):
            still = self._places.get(keys[depth], 0) & active
            if still != active:
                for name in self._bits(active & ~still):
                    found[name] = depth
                active = still
            depth += 1
        for name in self._bits(active):
            found[name] = depth
        return found

    def check_integrity(self) -> list[str]:
        """Findings in words: both directions of the index must say the same, and bounds must hold."""
        findings = []
        mirrored: dict[bytes, int] = {}
        for name, source in self._sources.items():
            if self._names.get(source.bit) != name:
                findings.append(f"index: bit of {name} belongs to {self._names.get(source.bit)}")
            if source.epoch is None and source.keys:
                findings.append(f"index: {len(source.keys)} keys of {name} survive a gap")
            for key in source.keys:
                mirrored[key] = mirrored.get(key, 0) | source.bit
        if mirrored != self._places:
            wrong = {k for k in mirrored.keys() | self._places.keys() if mirrored.get(k) != self._places.get(k)}
            findings.append(f"index: {len(wrong)} keys differ between the two directions")
        if len(self._places) > self._max_keys:
            findings.append(f"index: {len(self._places)} keys exceed the bound of {self._max_keys}")
        if len(self._names) != len(self._sources):
            findings.append("index: bits and workers differ in number")
        return findings

    def _free_bit(self) -> int:
        bit = 1
        while bit in self._names:
            bit <<= 1
        return bit

    def _bits(self, mask: int) -> Iterator[str]:
        while mask:
            bit = mask & -mask
            yield self._names[bit]
            mask ^= bit

    def _forget(self, source: _Source) -> None:
        for key in list(source.keys):
            self._remove(source, key)

    def _remove(self, source: _Source, key: bytes) -> None:
        if key not in source.keys:
            return
        source.keys.remove(key)
        left = self._places[key] & ~source.bit
        if left:
            self._places[key] = left
        else:
            del self._places[key]

    def _drop_oldest(self) -> None:
        key = next(iter(self._places))
        for name in self._bits(self._places.pop(key)):
            self._sources[name].keys.discard(key)
        self.dropped += 1
