"""Which bits each key has: the table under the prefix index.

Keys of one prompt come and go together, so their masks are equal: within one event equal masks become one integer
object, which saves memory (an integer of 1,000 bits takes 160 bytes) and lets a walk skip the AND.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

FEW = 8
"""Up to so many bits are found one by one, more by unpacking the whole mask."""
STRIDE = 16
"""Keys of a walk that are looked up together."""


class Places:
    """At most `max_keys` keys. At the bound the oldest go, a thousandth at a time: the front of a dictionary that lost
    its oldest entries is slow to find."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._masks: dict[bytes, int] = {}
        self._keys: dict[int, set[bytes]] = {}  # by bit
        self._names: list[str] = []  # by position of the bit; empty for one without a name
        self._named = 0  # mask
        self._free: list[int] = []
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._masks)

    def of(self, key: bytes) -> int:
        """The bits of `key`."""
        return self._masks.get(key, 0)

    def keys(self, bit: int) -> set[bytes]:
        """The keys that have `bit` (do not change it)."""
        return self._keys[bit]

    def count(self, bit: int) -> int:
        """How many keys have `bit`."""
        return len(self._keys[bit])

    def new_bit(self, name: str = "") -> int:
        """A bit that no key has. Only bits with a name are followed by `runs`."""
        if self._free:
            position = heapq.heappop(self._free)
        else:
            position = len(self._names)
            self._names.append("")
        bit = 1 << position
        self._names[position] = name
        self._named |= bit if name else 0
        self._keys[bit] = set()
        return bit

    def free_bit(self, bit: int) -> None:
        """No key has it any more, and the next `new_bit` may be it."""
        self.clear(bit)
        del self._keys[bit]
        self._named &= ~bit
        position = bit.bit_length() - 1
        self._names[position] = ""
        heapq.heappush(self._free, position)

    def add(self, bits: int, keys: Sequence[bytes]) -> None:
        """Give all of `bits` to each key; then forget the oldest keys beyond the bound."""
        sets = [self._keys[bit] for bit in _split(bits)]
        masks, equal = self._masks, {0: bits}
        for key in keys:
            old = masks.get(key, 0)
            new = equal.get(old)
            if new is None:
                new = equal[old] = old | bits
            masks[key] = new
        for held in sets:
            held.update(keys)
        if len(masks) > self._max_keys:
            self._drop_oldest(len(masks) - self._max_keys)

    def remove(self, bit: int, keys: Sequence[bytes]) -> None:
        """Take `bit` from each key that has it."""
        masks, held, equal = self._masks, self._keys[bit], {bit: 0}
        for key in keys:
            if key not in held:
                continue
            held.remove(key)
            old = masks[key]
            left = equal.get(old)
            if left is None:
                left = equal[old] = old & ~bit
            if left:
                masks[key] = left
            else:
                del masks[key]

    def clear(self, bit: int) -> None:
        """Take `bit` from every key."""
        self.remove(bit, list(self._keys[bit]))

    def runs(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """(depth, mask) in order of depth: the named bits that the first `depth` keys have and the next one has not."""
        get, before, active = self._masks.get, self._named, self._named
        for start in range(0, len(keys), STRIDE):
            masks = [get(key, 0) for key in keys[start : start + STRIDE]]
            if masks.count(before) == len(
                masks
            ):  # equal masks are mostly one object: found equal without a look inside
                continue
            for depth, mask in enumerate(masks, start):
                if mask is before:
                    continue
                before = mask
                still = mask & active
                if still != active:
                    if depth:
                        yield depth, active & ~still
                    if not still:
                        return
                    active = still
        if keys:
            yield len(keys), active

    def names(self, mask: int) -> list[str]:
        """The names of the bits in `mask`."""
        return [self._names[position] for position in positions(mask)]

    def check_integrity(self, owners: dict[int, str], unnamed: set[int]) -> list[str]:
        """Findings in words: `owners` are the named bits that should be, `unnamed` the others."""
        findings = []
        named = {bit: self._names[bit.bit_length() - 1] for bit in _split(self._named)}
        if named != owners or self._keys.keys() != owners.keys() | unnamed:
            findings.append("index: bits and sources differ")
        mirrored: dict[bytes, int] = {}
        for bit, keys in self._keys.items():
            for key in keys:
                mirrored[key] = mirrored.get(key, 0) | bit
        if mirrored != self._masks:
            wrong = {k for k in mirrored.keys() | self._masks.keys() if mirrored.get(k) != self._masks.get(k)}
            findings.append(f"index: {len(wrong)} keys differ between the two directions")
        if len(self._masks) > self._max_keys:
            findings.append(f"index: {len(self._masks)} keys exceed the bound of {self._max_keys}")
        return findings

    def _drop_oldest(self, too_many: int) -> None:
        for key in list(islice(self._masks, max(too_many, self._max_keys // 1000))):
            for bit in _split(self._masks.pop(key)):
                self._keys[bit].discard(key)
            self.dropped += 1


def positions(mask: int) -> list[int]:
    """Positions of the set bits of `mask`, lowest first."""
    if mask.bit_count() <= FEW:
        return [bit.bit_length() - 1 for bit in _split(mask)]
    packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()


def _split(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
