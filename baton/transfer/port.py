"""The Transport port: one verb, READ.

A reader pulls blocks out of a peer's registered arena into its own. Nobody ever writes into a peer, so an abort cannot
corrupt a stranger's pages. Implementations: `nixl` (UCX: RDMA, shared memory) and `tcp` (our own scatter read);
both pass `tests/unit/transfer/` (one conformance suite).

**Late reads.** A one-sided read cannot be cancelled. When its deadline passes while bytes may still arrive, its
destinations are *late*: `ReadReport.late` lists them, and they must not be reused before `ReadReport.settled` is done.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from baton.errors import Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle


@dataclass(frozen=True)
class Peer:
    """A process that can be read from, as its registration and `Pair` answer describe it.

    `metadata` maps a transport's name to what that transport needs to reach it (opaque bytes). `arena_bytes` bounds
    every handle: a segment outside it is refused before any read.
    """

    owner: str
    epoch: int
    arena_bytes: int
    metadata: dict[str, bytes]


@dataclass(frozen=True)
class BlockRead:
    """What became of one handle: `reason` is None when the bytes are in place and, if asked, verified."""

    handle: Handle
    offset: int
    reason: Reason | None


@dataclass(frozen=True)
class ReadReport:
    """What became of one batch, block by block, in the order asked. Completion of a part is legal.

    `late` are local offsets that the peer's bytes may still reach; they stay untouchable until `settled` is done.
    `seconds` is the time spent reading and verifying, `bytes` what arrived and passed.
    """

    blocks: Sequence[BlockRead]
    bytes: int
    seconds: float
    late: Sequence[int] = ()
    settled: asyncio.Future[None] | None = field(default=None, compare=False)

    def verified_prefix(self) -> int:
        """How many blocks, counted from the first, are in place: the usable prefix."""
        for i, block in enumerate(self.blocks):
            if block.reason is not None:
                return i
        return len(self.blocks)


class Transport(abc.ABC):
    """Reads blocks from peers into our arena, and lets peers read ours. All methods belong to one event loop."""

    name: str

    @abc.abstractmethod
    async def start(self, arena: Arena, owner: str, epoch: int, *, slot_bytes: int | None = None) -> None:
        """Register `arena` (once, for the life of the process) and become readable as `owner` in `epoch`.

        `slot_bytes` is how long the slots are that we read into: a longer handle is refused, since its bytes would run
        into the neighbour's. None means that the caller checks that itself.
        Raises BatonError(KV_TRANSFER_FAILED) when the library or its backend is not to be had here.
        """

    @abc.abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs to read from us: the value under our name in `Peer.metadata`."""

    @abc.abstractmethod
    async def pair(self, peer: Peer, deadline: float) -> None:
        """Make `peer` readable and warm the connection. Idempotent, single-flight for each peer.

        A new epoch of a known owner drops the old connection first. `deadline` is `time.monotonic()` seconds.
        Raises BatonError(KV_TRANSFER_FAILED | KV_TRANSFER_TIMEOUT).
        """

    @abc.abstractmethod
    async def read(
        self, handles: Sequence[Handle], into: Sequence[int], deadline: float, *, verify: bool = True
    ) -> ReadReport:
        """READ each handle's bytes to the arena offset at the same position in `into`.

        Never raises for a failed block: every block's fate is in the report (KV_TRANSFER_TIMEOUT, KV_TRANSFER_FAILED,
        KV_STALE_EPOCH when the owner is not paired in that epoch, KV_BAD_HANDLE when a segment lies outside the owner's
        arena or it does not fit its slot, KV_CHECKSUM_MISMATCH when `verify` and the sum differs). Cancelling the
        awaiting task is safe: what cannot be stopped becomes late and is told to `quarantined`. A destination that
        touches a quarantined one is refused (KV_TRANSFER_FAILED). After KV_TRANSFER_FAILED, `pair` again.
        """

    @abc.abstractmethod
    def quarantined(self) -> frozenset[int]:
        """Local offsets that late reads may still write to, from every batch, cancelled ones included."""

    @abc.abstractmethod
    def lease(self) -> AbstractContextManager[None]:
        """While at least one is open, peers can read from us: nixl makes progress each 1 ms then, and else sleeps."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop serving and drop every peer. Idempotent. Pages stay mapped: see `Arena`."""
