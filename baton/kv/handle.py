"""A handle says where a sealed block's bytes are right now, and how to know that they are the right ones."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

CHECKSUM_XXH3_64 = "xxh3-64"


@dataclass(frozen=True)
class Segment:
    """`length` bytes at `offset` in the owner's registered region number `region`."""

    region: int
    offset: int
    length: int


@dataclass(frozen=True)
class Handle:
    """Where one sealed block lies.

    `owner` is the worker's id and `epoch` the random u64 it took at start; `generation` is how often the slot has been
    reused, so a handle to an earlier tenant of the slot cannot verify. `tokens` is how many of the block's positions
    are valid: less than the block size only for a prompt's private last block, whose tail is zero. `fingerprint` is
    `LayoutFingerprint.digest()`.
    """

    key: bytes
    fingerprint: str
    owner: str
    epoch: int
    generation: int
    tokens: int
    segments: tuple[Segment, ...]
    checksum: int
    algorithm: str = CHECKSUM_XXH3_64

    @property
    def length(self) -> int:
        """Total bytes of the block."""
        return sum(s.length for s in self.segments)


def checksum(key: bytes, epoch: int, generation: int, payload: memoryview | bytes) -> int:
    """xxh3-64 over `key || epoch LE u64 || generation LE u64 || payload`.

    Identity is inside the sum: right bytes under a wrong name fail as surely as wrong bytes.
    """
    h = xxhash.xxh3_64()
    h.update(key + epoch.to_bytes(8, "little") + generation.to_bytes(8, "little"))
    h.update(payload)
    return h.intdigest()
