"""One `read` in flight over NIXL: blocks in chunks, each chunk one NIXL request, each request settled exactly once.

    WAITING ──begin──> POSTED ──settle──> READ ──verify──> done
       └─ dropped when the batch was abandoned; a chunk that is POSTED at that moment is *late*

The event loop abandons a batch (deadline, cancellation) and the driver's thread settles its chunks: one lock decides
who came first, so that a destination is in quarantine exactly when a byte may still arrive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from enum import Enum, auto

from baton.errors import Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle
from baton.transfer.nixl.driver import Link, Transfer
from baton.transfer.screen import verified


class State(Enum):
    """How far a chunk is."""

    WAITING = auto()
    POSTED = auto()
    SETTLED = auto()


class Chunk(Transfer):
    """Some blocks of a batch, all of one peer. `members` are their positions in the batch."""

    __slots__ = ("batch", "members", "state")

    def __init__(self, batch: Batch, link: Link, base: int, members: list[int]) -> None:
        local: list[tuple[int, int, int]] = []
        remote: list[tuple[int, int, int]] = []
        for i in members:
            at = batch.arena.address + batch.into[i]
            for segment in batch.handles[i].segments:
                local.append((at, segment.length, 0))
                remote.append((base + segment.offset, segment.length, 0))
                at += segment.length
        super().__init__(link, local, remote)
        self.batch = batch
        self.members = members
        self.state = State.WAITING

    def begin(self) -> bool:
        return self.batch.begin(self)

    def settle(self, error: str | None) -> None:
        self.batch.settle(self, error)

    def late(self) -> bool:
        return self.batch.abandoned


class Batch:
    """The blocks of one `read`. `reasons` holds what is known so far: a block that nothing happened to timed out."""

    def __init__(
        self,
        arena: Arena,
        handles: Sequence[Handle],
        into: Sequence[int],
        verifier: Executor | None,
        on_late_settled: Callable[[Chunk], None],
    ) -> None:
        self.arena = arena
        self.handles = handles
        self.into = into
        self.reasons: list[Reason | None] = [Reason.KV_TRANSFER_TIMEOUT] * len(handles)
        self.chunks: list[Chunk] = []
        self.abandoned = False
        self.owed = 0
        """Late chunks that have not settled yet."""
        self.settled: asyncio.Future[None] | None = None
        """Done when nothing is owed any more; None when nobody was told."""
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._loop_thread = threading.get_ident()
        self._verifier = verifier
        self._on_late_settled = on_late_settled
        self._lock = threading.Lock()
        self._open = 0

    def add(self, link: Link, base: int, members: list[int]) -> None:
        """One more chunk. All of them before the first is posted."""
        self.chunks.append(Chunk(self, link, base, members))
        self._open += 1

    def begin(self, chunk: Chunk) -> bool:
        """The driver is about to post `chunk`."""
        with self._lock:
            if self.abandoned:
                return False
            chunk.state = State.POSTED
            return True

    def settle(self, chunk: Chunk, error: str | None) -> None:
        """No byte of `chunk` can come any more."""
        with self._lock:
            chunk.state = State.SETTLED
            if self.abandoned:
                self._loop.call_soon_threadsafe(self._on_late_settled, chunk)
                return
            if error is not None:
                self._close(chunk, [Reason.KV_TRANSFER_FAILED] * len(chunk.members))
                return
        if self._verifier is None:
            self._finish(chunk)
        elif threading.get_ident() == self._loop_thread:
            self._check(chunk)  # a small read: the bytes are in the cache, and a hop would cost more than the sum
        else:
            self._verifier.submit(self._check, chunk)

    def abandon(self) -> list[Chunk]:
        """Nobody waits any more. The chunks whose bytes may still come; `on_late_settled` is told of each when over."""
        with self._lock:
            self.abandoned = True
            return [chunk for chunk in self.chunks if chunk.state is State.POSTED]

    def _check(self, chunk: Chunk) -> None:
        reasons: list[Reason | None] = []
        for i in chunk.members:
            good = verified(self.arena, self.handles[i], self.into[i])
            reasons.append(None if good else Reason.KV_CHECKSUM_MISMATCH)
        with self._lock:
            self._close(chunk, reasons)

    def _finish(self, chunk: Chunk) -> None:
        with self._lock:
            self._close(chunk, [None] * len(chunk.members))

    def _close(self, chunk: Chunk, reasons: Sequence[Reason | None]) -> None:
        if self.abandoned:
            return
        for i, reason in zip(chunk.members, reasons, strict=True):
            self.reasons[i] = reason
        self._open -= 1
        if self._open:
            return
        if threading.get_ident() == self._loop_thread:
            self._set_done()
        else:
            self._loop.call_soon_threadsafe(self._set_done)

    def _set_done(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
