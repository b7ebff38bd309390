"""What every transport asks of a block: may it be read at all, and are the bytes that came the right ones."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import Reason
from baton.kv.arena import Arena
from baton.kv.handle import CHECKSUM_XXH3_64, Handle, checksum
from baton.transfer.port import BlockRead, Peer, ReadReport
from baton.transfer.quarantine import Quarantine

MAX_U64 = (1 << 64) - 1
MAX_SEGMENTS = 1024
"""Of one block; ours have one, an engine with a page for each layer has as many as layers."""


def refusal(
    handle: Handle, offset: int, peer: Peer | None, arena_bytes: int, slot_bytes: int | None, quarantine: Quarantine
) -> Reason | None:
    """Why `handle` must not be read to local `offset`, or None.

    `peer` is who is paired under the handle's owner, if anyone. A handle is a claim made by another process: whatever
    could make us read outside the owner's arena, or write outside the one slot that was meant, is refused here, before
    a byte moves. Nothing is read over a destination that a late read may still write to.
    """
    if peer is None or peer.epoch != handle.epoch:
        return Reason.KV_STALE_EPOCH
    if len(handle.segments) > MAX_SEGMENTS:
        return Reason.KV_BAD_HANDLE
    length = 0
    for segment in handle.segments:
        if segment.region != 0 or segment.offset < 0 or segment.length <= 0:
            return Reason.KV_BAD_HANDLE
        if segment.offset + segment.length > peer.arena_bytes:
            return Reason.KV_BAD_HANDLE
        length += segment.length
    if length == 0 or (slot_bytes is not None and length > slot_bytes):
        return Reason.KV_BAD_HANDLE
    if offset < 0 or offset + length > arena_bytes:
        return Reason.KV_BAD_HANDLE
    if handle.algorithm != CHECKSUM_XXH3_64 or not 0 <= handle.generation <= MAX_U64:
        return Reason.KV_BAD_HANDLE
    if quarantine and quarantine.touches(offset, length):
        return Reason.KV_TRANSFER_FAILED
    return None


def collisions(handles: Sequence[Handle], into: Sequence[int]) -> set[int]:
    """Positions whose destination overlaps another one's in the same batch: each would spoil the other."""
    spoilt: set[int] = set()
    reach, holder = -1, -1
    for i in sorted(range(len(into)), key=into.__getitem__):
        if into[i] < reach:
            spoilt.update((i, holder))
        if into[i] + handles[i].length > reach:
            reach, holder = into[i] + handles[i].length, i
    return spoilt


def judge(arena: Arena, handle: Handle, offset: int) -> Reason | None:
    """None when the bytes at local `offset` are the ones that `handle` names. Lets go of the GIL while it sums."""
    payload = arena.view(offset, handle.length)
    if checksum(handle.key, handle.epoch, handle.generation, payload) == handle.checksum:
        return None
    return Reason.KV_CHECKSUM_MISMATCH


def report(
    handles: Sequence[Handle], into: Sequence[int], reasons: Sequence[Reason | None], seconds: float
) -> ReadReport:
    """A report of a batch in which nothing is late."""
    blocks: list[BlockRead] = []
    arrived = 0
    for handle, offset, reason in zip(handles, into, reasons, strict=True):
        blocks.append(BlockRead(handle, offset, reason))
        if reason is None:
            arrived += handle.length
    return ReadReport(blocks, arrived, seconds)
