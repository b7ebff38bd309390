"""The block pool's bookkeeping: which slot holds what, who holds it, and which keys can be found again.

A slot is *free*, *held* (pinned by sequences), *cached* (sealed, indexed by its key, held by nobody: the least recently
used goes first) or *quarantined* (a late read may still write to it). Its generation rises each time it is taken, so a
handle to an earlier tenant can never verify.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class PoolFull(Exception):
    """Fewer slots can be had than were asked for."""


@dataclass(slots=True)
class Slot:
    """One block's place. Once sealed, `tokens` counts its valid positions (0 = open) and `checksum` is of its bytes."""

    generation: int = 0
    refs: int = 0
    key: bytes = b""
    tokens: int = 0
    indexed: bool = False
    quarantined: bool = False
    checksum: int = 0


class BlockPool:
    """Bookkeeping only: bytes are the caller's. Not thread-safe: the engine's lock guards it."""

    def __init__(self, slots: int) -> None:
        self._slots = [Slot() for _ in range(slots)]
        self._free: deque[int] = deque(range(slots))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._quarantined = 0
        self._touched: dict[bytes, bool] = {}
        """Keys whose presence may have changed since `changes`, and whether they were there before."""

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, index: int) -> Slot:
        """The record of one slot; read only for callers."""
        return self._slots[index]

    @property
    def available(self) -> int:
        """Slots that `take` could give."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Indexed slots that nobody holds."""
        return len(self._cached)

    @property
    def quarantined(self) -> int:
        """Slots that wait for a late read."""
        return self._quarantined

    @property
    def keys(self) -> list[bytes]:
        """Every key that `match` can find."""
        return list(self._index)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Slots of the longest prefix of `keys` that is here. Pins nothing."""
        found: list[int] = []
        for key in keys:
            slot = self._index.get(key)
            if slot is None:
                break
            found.append(slot)
        return found

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Slots of those of `keys` that are here, holes left out. Pins nothing."""
        return [slot for key in keys if (slot := self._index.get(key)) is not None]

    def take(self, count: int) -> list[int]:
        """`count` open slots, each held once; cached ones are evicted as needed. Raises PoolFull and takes none."""
        if count > self.available:
            raise PoolFull(f"{count} blocks wanted, {self.available} of {len(self)} to be had")
        taken: list[int] = []
        for _ in range(count):
            if not self._free:
                self._evict(next(iter(self._cached)))
            index = self._free.popleft()
            slot = self._slots[index]
            self._slots[index] = Slot(generation=slot.generation + 1, refs=1)
            taken.append(index)
        return taken

    def hold(self, indices: Iterable[int]) -> None:
        """One more holder for each slot, which is held or cached."""
        for index in indices:
            self._cached.pop(index, None)
            self._slots[index].refs += 1

    def drop(self, indices: Iterable[int]) -> None:
        """One holder fewer for each; a slot that nobody holds is cached when indexed, else free."""
        for index in indices:
            slot = self._slots[index]
            if slot.refs <= 0:
                raise AssertionError(f"slot {index} dropped more often than held")
            slot.refs -= 1
            if slot.refs or slot.quarantined:
                continue
            if slot.indexed:
                self._cached[index] = None
            else:
                self._free.append(index)

    def seal(self, index: int, key: bytes, tokens: int, *, index_it: bool) -> None:
        """Nobody writes this slot again. A full block is indexed unless its key already is, elsewhere."""
        slot = self._slots[index]
        if slot.tokens:
            raise AssertionError(f"slot {index} sealed twice")
        slot.key, slot.tokens = key, tokens
        if index_it and key not in self._index:
            slot.indexed = True
            self._index[key] = index
            self._touched.setdefault(key, False)

    def set_checksum(self, index: int, checksum: int) -> None:
        """Keep a sealed slot's checksum."""
        self._slots[index].checksum = checksum

    def distrust(self, index: int) -> None:
        """An indexed slot does not hold what was sealed: nobody finds it any more."""
        if index in self._cached:
            self._evict(index)
            return
        slot = self._slots[index]
        del self._index[slot.key]
        self._touched.setdefault(slot.key, True)
        slot.indexed = False

    def quarantine(self, index: int) -> None:
        """A held, open slot becomes untouchable: one holder fewer, and not free before `settle`."""
        self._slots[index].quarantined = True
        self._quarantined += 1
        self.drop([index])

    def settle(self, index: int) -> None:
        """The late read is over: the slot can be taken again."""
        slot = self._slots[index]
        if not slot.quarantined:
            return
        slot.quarantined = False
        self._quarantined -= 1
        if slot.refs == 0:
            self._free.append(index)

    def clear(self) -> int:
        """Evict everything that nobody holds; how many blocks."""
        dropped = len(self._cached)
        for index in list(self._cached):
            self._evict(index)
        return dropped

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) keys since the last call, without what came and went in between."""
        touched, self._touched = self._touched, {}
        stored = [key for key, before in touched.items() if not before and key in self._index]
        removed = [key for key, before in touched.items() if before and key not in self._index]
        return stored, removed

    def _evict(self, index: int) -> None:
        slot = self._slots[index]
        del self._cached[index]
        del self._index[slot.key]
        self._touched.setdefault(slot.key, True)
        slot.indexed = False
        self._free.append(index)

    def check_integrity(self, holders: Counter[int]) -> list[str]:
        """Findings against `holders` (slot -> how many hold it, by the caller's count); empty when all adds up."""
        found: list[str] = []
        free, cached = Counter(self._free), set(self._cached)
        for index, slot in enumerate(self._slots):
            if slot.refs != holders[index]:
                found.append(f"slot {index} has {slot.refs} holders, {holders[index]} known")
            places = free[index] + (index in cached) + (slot.refs > 0) + (slot.quarantined and not slot.refs)
            if places != 1:
                found.append(f"slot {index} is in {places} places (free, cached, held, quarantined)")
            if slot.indexed and self._index.get(slot.key) != index:
                found.append(f"slot {index} says it is indexed, the index does not")
        for key, index in self._index.items():
            slot = self._slots[index]
            if not slot.indexed or slot.key != key or not slot.tokens:
                found.append(f"key {key.hex()} points at slot {index}, which holds something else")
        return found
