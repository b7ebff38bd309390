"""The Tier port: a place that holds sealed blocks by key. Host memory is the first one, disks come below it.

All tiers of a store hold blocks of one shape at a time, and a block in a lower tier keeps no promise of place: only the
host tier hands out handles, so a block is loaded into it before it can be read by others.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockShape:
    """What all blocks of a store have in common: layout digest, bytes, and the tokens a full block holds."""

    fingerprint: str
    block_bytes: int
    tokens: int


@dataclass(frozen=True)
class TierStats:
    """A tier now. `used_bytes` counts every block that takes room, `pinned` the blocks that may not go."""

    name: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    pinned: int


class Tier(abc.ABC):
    """Methods belong to one event loop; those that move bytes are async and may take as long as the medium does."""

    name: str

    @abc.abstractmethod
    def holds(self, key: bytes) -> bool:
        """Whether `load` would find this key."""

    @abc.abstractmethod
    async def store(self, key: bytes, payload: memoryview) -> bool:
        """Keep a copy of `payload`. False when there is no room; a key that is here already is kept and true."""

    @abc.abstractmethod
    async def load(self, key: bytes, into: memoryview) -> bool:
        """Copy the block's bytes out. False when it is not here (any more)."""

    @abc.abstractmethod
    def clear(self) -> list[bytes]:
        """Forget everything; pinned bytes stay untouched until unpinned. The keys that were here."""

    @abc.abstractmethod
    def stats(self) -> TierStats:
        """Its state now."""

    @abc.abstractmethod
    def check_integrity(self) -> list[str]:
        """Findings of the leak check, in words; empty when every byte is accounted for."""
