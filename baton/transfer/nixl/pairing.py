"""Becoming able to read from a peer: its agent is added, and a first small read connects the two."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.transfer.nixl.driver import Link, Transfer
from baton.transfer.port import Peer

WARM_BYTES = 64


def agent_name(owner: str, epoch: int) -> str:
    """What NIXL calls that process."""
    return f"{owner}@{epoch:016x}"


@dataclass(eq=False)
class Pairing:
    """A peer, its link, and the future of its first read: done when it can be read from, failed with a BatonError."""

    peer: Peer
    link: Link
    base: int
    ready: asyncio.Future[None]


class WarmUp(Transfer):
    """The first read from a peer, into scratch: it connects the two, and shows that bytes come."""

    __slots__ = ("_loop", "_ready")

    def __init__(self, known: Pairing, scratch: Arena) -> None:
        size = min(WARM_BYTES, known.peer.arena_bytes)
        super().__init__(known.link, [(scratch.address, size, 0)], [(known.base, size, 0)])
        self._ready = known.ready
        self._loop = known.ready.get_loop()

    def begin(self) -> bool:
        return True

    def settle(self, error: str | None) -> None:
        self._loop.call_soon_threadsafe(settle_ready, self._ready, error)

    def late(self) -> bool:
        return False


def settle_ready(ready: asyncio.Future[None], error: str | None) -> None:
    """End the wait for a pairing."""
    if ready.done():
        return
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(BatonError(Reason.KV_TRANSFER_FAILED, f"nixl: {error}"))
        ready.exception()  # whoever waits sees it; nobody may be waiting
