"""Which bits each key has: the table under the prefix index.

A key has a row: its bytes, and its mask of bits. Keys of one prompt come in one event and get rows side by side, and
they are asked for together. So a walk looks up the first key and compares the bytes from its row on with those asked
for: as far as they are equal no other look-up is needed. Where they lie is only a hint: each key is compared and each
mask read, so a walk is exact whatever was removed, and rows that lie apart only make it slower.

Equal masks become one integer object within an event, which saves memory (an integer of 1,000 bits takes 160 bytes) and
lets a walk see without a look inside that a mask is the one before.

Each row has the era in which its key was told first or a walk last matched it: one byte, written for a whole run at
once. At the bound those of the oldest era go, the highest rows first: a key is of no use without those before it, which
a walk always marks with it, and which lie below it when they were told together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from baton.kv.keys import KEY_BYTES

FEW = 8
"""Up to so many bits are found one by one, more by unpacking the whole mask."""
ERAS = 64
"""So many pass while as many keys are told as there may be."""
LAST_ERA = 254
FREE = 255
"""In place of its era: the row is free."""


class Places:
    """At most `max_keys` keys. At the bound those go that nobody has told or asked for the longest, a thousandth at a
    time: looking for them takes some 0.1 ms."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._rows: dict[bytes, int] = {}
        self._packed = bytearray()  # the key of each row
        self._masks: list[int] = []  # by row; 0 in a free one
        self._free: list[int] = []  # rows, a heap: the lowest first, so that neighbours are likely
        self._eras = bytearray()  # by row
        self._era = 0
        self._told = 0  # new keys of this era
        self._held: dict[int, set[int]] = {}  # rows by bit
        self._names: list[str] = []  # by position of the bit; empty for one without a name
        self._named = 0  # mask
        self._free_positions: list[int] = []
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, key: bytes) -> int:
        """The bits of `key`."""
        row = self._rows.get(key)
        return 0 if row is None else self._masks[row]

    def keys(self, bit: int) -> set[bytes]:
        """The keys that have `bit`."""
        return {self._key(row) for row in self._held[bit]}

    def count(self, bit: int) -> int:
        """How many keys have `bit`."""
        return len(self._held[bit])

    def new_bit(self, name: str = "") -> int:
        """A bit that no key has. Only bits with a name are followed by `runs`."""
        if self._free_positions:
            position = heapq.heappop(self._free_positions)
        else:
            position = len(self._names)
            self._names.append("")
        bit = 1 << position
        self._names[position] = name
        self._named |= bit if name else 0
        self._held[bit] = set()
        return bit

    def free_bit(self, bit: int) -> None:
        """No key has it any more, and the next `new_bit` may be it."""
        self.clear(bit)
        del self._held[bit]
        self._named &= ~bit
        position = bit.bit_length() - 1
        self._names[position] = ""
        heapq.heappush(self._free_positions, position)

    def add(self, bits: int, keys: Sequence[bytes]) -> None:
        """Give all of `bits` to each key; then forget as many as are beyond the bound. Raises ValueError when a key is
        not of `KEY_BYTES`."""
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"a block's key is not of {KEY_BYTES} bytes")
        known, masks, equal = self._rows, self._masks, {0: bits}
        rows, before = [], len(known)
        for key in keys:
            row = known.get(key)
            if row is None:
                row = known[key] = self._new_row(key)
            old = masks[row]
            new = equal.get(old)
            if new is None:
                new = equal[old] = old | bits
            masks[row] = new
            rows.append(row)
        for bit in _split(bits):
            self._held[bit].update(rows)
        self._told += len(known) - before
        if len(known) > self._max_keys:
            self._drop_oldest(len(known) - self._max_keys)
        if self._told * ERAS >= self._max_keys:
            self._next_era()

    def remove(self, bit: int, keys: Iterable[bytes]) -> None:
        """Take `bit` from each key that has it."""
        held, rows = self._held[bit], map(self._rows.get, dict.fromkeys(keys))
        self._take(bit, [row for row in rows if row is not None and row in held])

    def clear(self, bit: int) -> None:
        """Take `bit` from every key."""
        self._take(bit, list(self._held[bit]))

    def runs(self, packed: bytes) -> list[tuple[int, int]]:
        """(depth, mask) in order of depth: the named bits that the first `depth` keys have and the next one has not.
        `packed` is the keys side by side. What is matched is the last to be forgotten. Raises ValueError when the last
        key is not of `KEY_BYTES`."""
        count, rest = divmod(len(packed), KEY_BYTES)
        if rest:
            raise ValueError(f"a block's key is not of {KEY_BYTES} bytes")
        found: list[tuple[int, int]] = []
        depth, active = 0, self._named
        while depth < count:
            start = depth * KEY_BYTES
            row = self._rows.get(packed[start : start + KEY_BYTES])
            if row is None:
                break
            together = self._together(packed, depth, row)
            for offset, mask in _changes(self._masks[row : row + together]):
                if not mask:  # a free row still has the bytes of its last key, which may lie elsewhere now
                    together = offset
                    break
                still = mask & active
                if still != active:
                    if depth + offset:
                        found.append((depth + offset, active & ~still))
                    if not still:
                        self._asked(row, offset)
                        return found
                    active = still
            self._asked(row, together)
            depth += together
        if depth:
            found.append((depth, active))
        return found

    def names(self, mask: int) -> list[str]:
        """The names of the bits in `mask`."""
        if mask.bit_count() == 1:
            return [self._names[mask.bit_length() - 1]]
        return [self._names[position] for position in positions(mask)]

    def check_integrity(self, owners: dict[int, str], unnamed: set[int]) -> list[str]:
        """Findings in words: `owners` are the named bits that should be, `unnamed` the others."""
        findings = []
        named = {bit: self._names[bit.bit_length() - 1] for bit in _split(self._named)}
        if named != owners or self._held.keys() != owners.keys() | unnamed:
            findings.append("index: bits and sources differ")
        mirrored = [0] * len(self._masks)
        for bit, rows in self._held.items():
            for row in rows:
                mirrored[row] |= bit
        wrong = sum(ours != theirs for ours, theirs in zip(mirrored, self._masks, strict=True))
        if wrong:
            findings.append(f"index: {wrong} keys differ between the two directions")
        if any(self._key(row) != key or not self._masks[row] for key, row in self._rows.items()):
            findings.append("index: a key lies in a row that is not its own")
        if len(self._rows) + len(self._free) != len(self._masks) or any(self._masks[row] for row in self._free):
            findings.append("index: rows are lost, or free and in use")
        if len(self._eras) != len(self._masks) or self._eras.count(FREE) != len(self._free):
            findings.append("index: eras and rows differ")
        if len(self._rows) > self._max_keys:
            findings.append(f"index: {len(self._rows)} keys exceed the bound of {self._max_keys}")
        return findings

    def _key(self, row: int) -> bytes:
        return bytes(self._packed[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def _new_row(self, key: bytes) -> int:
        if self._free:
            row = heapq.heappop(self._free)
            self._packed[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
            self._eras[row] = self._era
            return row
        self._packed += key
        self._masks.append(0)
        self._eras.append(self._era)
        return len(self._masks) - 1

    def _together(self, packed: bytes, depth: int, row: int) -> int:
        """How many keys of `packed`, from `depth` on, lie in `row` and those behind it; the first does."""
        second = (depth + 1) * KEY_BYTES
        key = packed[second : second + KEY_BYTES]
        if not key or not self._packed.startswith(key, (row + 1) * KEY_BYTES):
            return 1
        return in_common(packed, depth, self._packed, row)

    def _take(self, bit: int, rows: list[int]) -> None:
        masks, equal = self._masks, {bit: 0}
        self._held[bit].difference_update(rows)
        for row in rows:
            old = masks[row]
            left = equal.get(old)
            if left is None:
                left = equal[old] = old & ~bit
            masks[row] = left
            if not left:
                self._release(row)

    def _release(self, row: int) -> None:
        """Nobody has the key any more."""
        del self._rows[self._key(row)]
        self._eras[row] = FREE
        heapq.heappush(self._free, row)

    def _asked(self, row: int, count: int) -> None:
        """A walk matched so many rows from `row` on; none is free."""
        self._eras[row : row + count] = bytes((self._era,)) * count

    def _next_era(self) -> None:
        """What is told and asked for from now on is younger. When there is no later era, the younger half of them takes
        the numbers of the older, which become one."""
        self._told = 0
        if self._era == LAST_ERA:
            half = LAST_ERA // 2
            eras = np.frombuffer(self._eras, np.uint8)
            np.subtract(np.maximum(eras, half), half, out=eras, where=eras != FREE)
            self._era -= half
        self._era += 1

    def _drop_oldest(self, too_many: int) -> None:
        left = max(too_many, self._max_keys // 1000)
        while left:
            eras = np.frombuffer(self._eras, np.uint8)
            rows = np.flatnonzero(eras == eras.min())[-left:][::-1].tolist()
            for row in rows:
                for bit in _split(self._masks[row]):
                    self._held[bit].discard(row)
                self._masks[row] = 0
                self._release(row)
            left -= len(rows)
            self.dropped += len(rows)


def _changes(masks: list[int]) -> list[tuple[int, int]]:
    """(place, mask) of the first and of each that is another one than that before it."""
    before = masks[0]
    found = [(0, before)]
    # Equal ones are mostly one object: counted without a look inside.
    if masks.count(before) != len(masks):
        for place, mask in enumerate(masks):
            if mask is not before:
                before = mask
                found.append((place, mask))
    return found


def in_common(these: bytes, this: int, those: bytes | bytearray, that: int) -> int:
    """How many packed keys are the same from place `this` of the ones and `that` of the others on; the first is. By
    halves: comparing bytes where they lie is sooner done a few times than one call that tells where they differ."""
    low, high = 1, min(len(these) // KEY_BYTES - this, len(those) // KEY_BYTES - that)
    while low < high:
        middle = (low + high + 1) // 2
        if those.startswith(these[(this + low) * KEY_BYTES : (this + middle) * KEY_BYTES], (that + low) * KEY_BYTES):
            low = middle
        else:
            high = middle - 1
    return low


def positions(mask: int) -> list[int]:
    """Positions of the set bits of `mask`, lowest first."""
    if mask.bit_count() <= FEW:
        few = []
        while mask:
            highest = mask.bit_length() - 1
            few.append(highest)
            mask ^= 1 << highest
        return few[::-1]
    packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()


def _split(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
