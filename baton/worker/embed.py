"""Embeddings: inputs of unary calls, a bounded part of the pool at a time, each watched until the engine answers.

No session and no attempt stand behind them: a call that breaks is made again, elsewhere, by whoever made it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from baton.errors import BatonError, Reason
from baton.v1 import worker_pb2 as pb
from baton.worker.context import WorkerContext, remaining_s
from baton.worker.watch import Watchers

AT_ONCE = 32
"""Inputs in the engine."""
POOL_SHARE = 4
"""And their blocks are one in so many of the pool's, or one input's."""
MAX_WAITING = 64
"""Calls that may be here at once."""
WATCH_S = 0.5


class Embeddings:
    """Computes inputs for callers."""

    def __init__(self, context: WorkerContext, watchers: Watchers) -> None:
        self._context = context
        self._watchers = watchers
        # The batch lane has a room of its own: nobody waits behind it.
        self._rooms = {batch: Room(AT_ONCE, max(1, context.spec.pool_blocks // POOL_SHARE)) for batch in (False, True)}
        self._calls: list[tuple[str, bool]] = []
        """Uids, and whether they are of the batch lane."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def embed(self, request: pb.EmbedRequest) -> list[bytes]:
        """The vector of each input, in order. Raises BatonError with nothing left behind; cancelling stops it."""
        context = self._context
        context.check_serving()
        context.check_moving(Reason.DECODE_UNAVAILABLE)
        context.check_card(request.card)
        if sum(batch == request.batch for _, batch in self._calls) >= MAX_WAITING:
            raise BatonError(Reason.NO_CAPACITY, f"{MAX_WAITING} calls for embeddings are here already")
        call = (request.uid, request.batch)
        self._calls.append(call)
        self._idle.clear()
        self._watchers.admitted(request.uid)
        try:
            async with asyncio.timeout(remaining_s(request.deadline)):
                return await self._all(request)
        except TimeoutError:
            raise BatonError(Reason.DEADLINE_EXCEEDED, "the deadline passed before the embeddings were made") from None
        finally:
            self._calls.remove(call)
            if not self._calls:
                self._idle.set()

    async def _all(self, request: pb.EmbedRequest) -> list[bytes]:
        """One that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(one.ids, request)) for one in request.inputs]
        except* BatonError as failed:
            raise _first(failed) from failed
        return [task.result() for task in tasks]

    async def _one(self, ids: Sequence[int], request: pb.EmbedRequest) -> bytes:
        engine = self._context.engine
        async with self._rooms[request.batch].take(-(-len(ids) // self._context.spec.block_size)):
            answer = asyncio.create_task(engine.embed(ids, request.deadline, batch=request.batch), name="embedding")
            try:
                while not answer.done():
                    await asyncio.wait((answer,), timeout=WATCH_S)
                    if not answer.done():
                        self._context.check_moving(Reason.ENGINE_FAILED)
                return answer.result()
            finally:
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)

    async def idle(self, timeout_s: float | None) -> int:
        """Wait until no call is here, for so long (None: for ever). Returns how many are left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return len(self._calls)

    def findings(self) -> list[str]:
        """Open calls, in words."""
        inside = [finding for room in self._rooms.values() for finding in room.findings()]
        return [f"embeddings of {uid} are being made" for uid, _ in self._calls] + inside


class Room:
    """Who may be in the engine: so many inputs, so many blocks, in order of arrival; one that is larger goes alone."""

    def __init__(self, inputs: int, blocks: int) -> None:
        self._inputs = inputs
        self._blocks = blocks
        self._inside: list[int] = []
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, blocks: int) -> AsyncIterator[None]:
        """Wait for room, and have it until the context is left."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (blocks, turn)
        self._waiting.append(entry)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # let in and cancelled in the same turn of the loop
                self._leave(blocks)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._let_in()
            raise
        try:
            yield
        finally:
            self._leave(blocks)

    def _leave(self, blocks: int) -> None:
        self._inside.remove(blocks)
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and len(self._inside) < self._inputs:
            blocks, turn = self._waiting[0]
            if not turn.done() and self._inside and sum(self._inside) + blocks > self._blocks:
                return
            self._waiting.popleft()
            if not turn.done():  # cancelled
                self._inside.append(blocks)
                turn.set_result(None)

    def findings(self) -> list[str]:
        """What is inside, in words."""
        return [f"{len(self._inside)} inputs are in the engine"] if self._inside else []


def _first(group: BaseExceptionGroup[BatonError]) -> BatonError:
    """One of a group's errors."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BatonError)
    return error
