"""The Tier port: a place that holds sealed blocks by key. Host memory is the first one; device memory and disks come
below it.

All tiers of a store hold blocks of one shape at a time, and a block in a lower tier keeps no promise of place: only the
host tier hands out handles, so a block is loaded into it before it can be read by others. What a tier hands back was
checked against its checksum first; what fails is dropped and is a miss.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from baton.errors import BatonError, Reason


@dataclass(frozen=True)
class BlockShape:
    """What all blocks of a store have in common: layout digest, bytes, and the tokens a full block holds."""

    fingerprint: str
    block_bytes: int
    tokens: int


@dataclass(frozen=True)
class Facts:
    """What goes with a block into whichever tier: whose it is, and until when (seconds since 1970; 0 = for ever)."""

    tenant: str = ""
    expires: float = 0.0

    def expired(self, now: float | None = None) -> bool:
        """Whether its time is over."""
        return bool(self.expires) and self.expires <= (time.time() if now is None else now)


@dataclass(frozen=True)
class Placed:
    """A block in one tier, for `baton kv ls`."""

    facts: Facts
    pins: int
    idle_s: float


@dataclass(frozen=True)
class TierStats:
    """A tier now. `used_bytes` counts every block that takes room, `pinned` the blocks that may not go. Speeds are
    measured, 0 while they were not. `state` is "ok", or why the tier is not used now."""

    name: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    pinned: int
    read_bytes_s: float = 0.0
    read_latency_s: float = 0.0
    state: str = "ok"


class Speed:
    """A moving average of what reading costs: seconds for one block alone, bytes a second for several at once."""

    WEIGHT = 0.2

    def __init__(self) -> None:
        self.bytes_s = 0.0
        self.latency_s = 0.0

    def alone(self, bytes: int, seconds: float) -> None:
        """One block took so long; until a batch was measured its rate stands for the tier's."""
        self.latency_s = self._mean(self.latency_s, seconds)
        if not self.bytes_s:
            self.bytes_s = bytes / max(seconds, 1e-6)

    def batch(self, bytes: int, seconds: float) -> None:
        """Several blocks at once took so long."""
        self.bytes_s = self._mean(self.bytes_s, bytes / max(seconds, 1e-6))

    def _mean(self, old: float, new: float) -> float:
        return new if not old else old + self.WEIGHT * (new - old)


class Verdict(StrEnum):
    """What reading a block has shown. One that left meanwhile is sound: nothing is wrong with it."""

    SOUND = "sound"
    BAD = "bad"
    UNREADABLE = "unreadable"


def verdict(outcome: str) -> Verdict:
    """What a load's outcome, as it is counted, says of the block."""
    if outcome in ("ok", "missing"):
        return Verdict.SOUND
    return Verdict.BAD if outcome == "corrupt" else Verdict.UNREADABLE


class Tier(abc.ABC):
    """Methods belong to one event loop; those that move bytes are async and end by a deadline of the tier's own.

    `on_gone(keys, reason)` is called for blocks that left without being asked to: "capacity", "quota", "corrupt",
    "layout".
    """

    name: str

    def __init__(self) -> None:
        self.on_gone: Callable[[list[bytes], str], None] = lambda keys, reason: None
        self.on_found: Callable[[list[bytes]], None] = lambda keys: None
        """Blocks that are here without having been stored in this life of the process."""
        self.speed = Speed()

    @property
    @abc.abstractmethod
    def shape(self) -> BlockShape | None:
        """What blocks look like here; None until `fix`."""

    @property
    def occupied(self) -> bool:
        """Whether blocks of `shape` are here, or may be for all that is known yet."""
        return bool(self.stats().blocks)

    @abc.abstractmethod
    def fix(self, shape: BlockShape) -> None:
        """Take blocks of `shape` from now on. Raises BatonError: KV_LAYOUT_MISMATCH (blocks of another shape are here
        and may not go), NO_CAPACITY (not one block fits)."""

    @abc.abstractmethod
    def holds(self, key: bytes) -> bool:
        """Whether `load` would look for this key's bytes."""

    @abc.abstractmethod
    def keys(self) -> list[bytes]:
        """Every key that it holds."""

    @abc.abstractmethod
    def placed(self, key: bytes) -> Placed | None:
        """What is known of a block; None when it is not here."""

    @abc.abstractmethod
    async def store(self, key: bytes, payload: memoryview, facts: Facts) -> bool:
        """Keep a copy of `payload`. False when it could not be kept; a key that is here already is kept and true."""

    @abc.abstractmethod
    async def load(self, key: bytes, into: memoryview) -> bool:
        """Copy the block's bytes out, checked. False when they cannot be had; then `into` holds anything, and nobody
        writes to it after the call has ended."""

    @abc.abstractmethod
    async def verify(self, key: bytes) -> Verdict:
        """Read the block and check it. A bad one is dropped; one that could not be read stays."""

    @abc.abstractmethod
    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        """Forget these; pinned bytes stay untouched until unpinned. Those that were here."""

    @abc.abstractmethod
    def stats(self) -> TierStats:
        """Its state now."""

    @abc.abstractmethod
    def check_integrity(self) -> list[str]:
        """Findings of the leak check, in words; empty when every byte is accounted for."""

    @abc.abstractmethod
    def clear(self, tenant: str = "") -> list[bytes]:
        """Forget everything, or one tenant's blocks; the keys that were here. What is being written of them now is
        not here afterwards."""

    @property
    def dirty(self) -> bool:
        """Whether a block that was forgotten could come back when the process starts again."""
        return False

    async def flush(self) -> None:
        """Make what was forgotten stay forgotten, as far as that can be done now. Raises OSError; then what is left is
        for the next call."""
        return

    async def close(self) -> None:
        """Let go of files and threads."""
        return


def slots_for(shape: BlockShape, slot_bytes: int, capacity: int, where: str) -> int:
    """How many slots of `slot_bytes` fit into `capacity` bytes. Raises BatonError NO_CAPACITY when none does."""
    if capacity < slot_bytes:
        text = f"a block of {shape.block_bytes} bytes is larger than the {where} of {capacity}"
        raise BatonError(Reason.NO_CAPACITY, text)
    return capacity // slot_bytes
