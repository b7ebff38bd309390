"""One `read` in flight over NIXL: blocks in chunks, each chunk one NIXL request, each request settled exactly once.

    WAITING ──begin──> POSTED ──settle──> SETTLED ──verify──> in the report
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
from baton.transfer.screen import judge


class State(Enum):
    """How far a chunk is."""

    WAITING = auto()
    POSTED = auto()
    SETTLED = auto()


class Chunk(Transfer):
    """Some blocks of a batch, all of one peer. `members` are their positions in the batch."""

    __slots__ = ("batch", "members", "size", "state")

    batch: Batch

    def __init__(self, link: Link) -> None:
        super().__init__(link, [], [])
        self.members: list[int] = []
        self.size = 0
        self.state = State.WAITING

    def add(self, position: int, handle: Handle, target: int, base: int) -> None:
        """One more block: from the peer's arena at `base` to our address `target`, segment after segment."""
        for segment in handle.segments:
            length = segment.length
            self.local.append((target, length, 0))
            self.remote.append((base + segment.offset, length, 0))
            target += length
            self.size += length
        self.members.append(position)

    def begin(self) -> bool:
        return self.batch.begin(self)

    def settle(self, error: str | None) -> None:
        self.batch.settle(self, error)

    def late(self) -> bool:
        return self.batch.abandoned


class Batch:
    """The blocks of one `read`. `reasons` holds what is known so far of each; `done` ends when all chunks have."""

    def __init__(
        self,
        arena: Arena,
        handles: Sequence[Handle],
        into: Sequence[int],
        reasons: list[Reason | None],
        chunks: Sequence[Chunk],
        verifier: Executor | None,
        on_late_settled: Callable[[Chunk], None],
    ) -> None:
        self.arena = arena
        self.handles = handles
        self.into = into
        self.reasons = reasons
        self.chunks = chunks
        self.abandoned = False
        self.owed = 0
        """Late chunks that have not settled yet."""
        self.settled: asyncio.Future[None] | None = None
        """Done when nothing is owed any more; None when nobody was told."""
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._verifier = verifier
        self._on_late_settled = on_late_settled
        self._lock = threading.Lock()
        self._open = len(chunks)
        for chunk in chunks:
            chunk.batch = self

    def begin(self, chunk: Chunk) -> bool:
        """`chunk` is about to be posted. False when nobody waits for it any more."""
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
            if error is not None or self._verifier is None:
                verdict = None if error is None else Reason.KV_TRANSFER_FAILED
                self._close(chunk, [verdict] * len(chunk.members))
                return
        try:
            self._verifier.submit(self._verify, chunk)
        except RuntimeError:  # closed meanwhile: what cannot be verified is not used
            with self._lock:
                self._close(chunk, [Reason.KV_TRANSFER_FAILED] * len(chunk.members))

    def abandon(self) -> list[Chunk]:
        """Nobody waits any more. The chunks whose bytes may still come; `on_late_settled` is told of each when over."""
        with self._lock:
            self.abandoned = True
            return [chunk for chunk in self.chunks if chunk.state is State.POSTED]

    def _verify(self, chunk: Chunk) -> None:
        verdicts = [judge(self.arena, self.handles[i], self.into[i]) for i in chunk.members]
        with self._lock:
            self._close(chunk, verdicts)

    def _close(self, chunk: Chunk, verdicts: Sequence[Reason | None]) -> None:
        if self.abandoned:
            return
        for i, verdict in zip(chunk.members, verdicts, strict=True):
            self.reasons[i] = verdict
        self._open -= 1
        if not self._open:
            self._loop.call_soon_threadsafe(self._set_done)

    def _set_done(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
