"""An engine of the test's own behind the Engine port: no model, every step under the test's control.

Token i of a request is a function of its prompt and i, so what a client gets can be checked. `pace` holds steps back;
`fail_*` make one step raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Sequence

from baton.engine.needs import lacked_grammars
from baton.engine.port import (
    CacheEvent,
    Engine,
    EngineSpec,
    EngineStats,
    FinishReason,
    FirstToken,
    PrefillDone,
    PrefillEvent,
    Reader,
    Request,
    Reservation,
    Resume,
    SealedBlocks,
    TokenEvent,
)
from baton.errors import BatonError, Reason
from baton.kv.handle import Handle
from baton.kv.layout import LayoutFingerprint
from baton.transfer.port import BlockRead, ReadReport

BLOCK = 4
LAYOUT = LayoutFingerprint("m", 1, 1, 8, BLOCK, "float32")
SPEC = EngineSpec("scripted", LAYOUT, BLOCK, 1000, 8, 100, 1000, Resume.EXACT, (0,), lacks=lacked_grammars(()))


def token(prompt: Sequence[int], choice: int, i: int) -> int:
    """The i-th output token of a choice."""
    return (sum(prompt) + 31 * choice + 7 * i) % 997


class ScriptedReservation(Reservation):
    """Knows what was loaded and whether it was released."""

    def __init__(self, engine: ScriptedEngine, request: Request) -> None:
        self.engine = engine
        self.request = request
        self.cached_tokens = 0
        self.hit_tokens = 0
        self.released = False
        self.task: asyncio.Task[None] | None = None

    async def load(self, first_block: int, handles: Sequence[Handle], reader: Reader, deadline: float) -> ReadReport:
        await self.engine.step()
        blocks = []
        for i, handle in enumerate(handles):
            bad = self.engine.fail_read.pop() if self.engine.fail_read else None
            blocks.append(BlockRead(handle, 0, bad))
            if bad is not None:
                break
            if first_block * BLOCK <= self.cached_tokens:
                self.cached_tokens = max(self.cached_tokens, (first_block + i) * BLOCK + handle.tokens)
        return ReadReport(blocks, 100 * len(blocks), 0.001)

    async def release(self) -> None:
        if self.released:
            return
        await asyncio.sleep(0)
        self.released = True
        if self.task is not None:
            self.task.cancel()
        self.engine.live.discard(self)


class ScriptedEngine(Engine):
    """See the module."""

    def __init__(self) -> None:
        self.live: set[ScriptedReservation] = set()
        self.made: list[ScriptedReservation] = []
        self.queue: asyncio.Queue[list[TokenEvent] | BatonError] = asyncio.Queue()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_reserve: BatonError | None = None
        self.fail_read: list[Reason] = []
        self.first_stops = False
        self.cached: set[bytes] = set()
        """Keys that `hold` finds."""
        self.held: list[list[bytes]] = []
        self.embedding: list[int] = []
        self.lined: list[int] = []
        """Of the batch lane, whether they have ended or not."""
        """Lengths of the inputs that are here."""
        self.stopped_at = 0.0
        """`EngineStats.step_started`."""
        self.generated: list[tuple[Request, Sequence[FirstToken], int]] = []

    async def step(self) -> None:
        """Where the test can hold things back."""
        await self.gate.wait()
        await asyncio.sleep(0)

    async def start(self) -> EngineSpec:
        return SPEC

    async def reserve(self, request: Request, *, decode_room: bool = True) -> Reservation:
        await self.step()
        if self.fail_reserve is not None:
            raise self.fail_reserve
        reservation = ScriptedReservation(self, request)
        self.live.add(reservation)
        self.made.append(reservation)
        return reservation

    async def prefill(self, reservation: Reservation) -> AsyncIterator[PrefillEvent]:  # type: ignore[override]
        request = reservation.request
        prompt = [*request.prompt_ids, *request.emitted_ids]
        blocks = -(-len(prompt) // BLOCK)
        for i in range(blocks):
            await self.step()
            size = min(BLOCK, len(prompt) - i * BLOCK)
            yield SealedBlocks(i, (Handle(bytes(16), LAYOUT.digest(), "p", 1, 1, size, (), 0),))
        await self.step()
        yield PrefillDone(tuple(self.first(request)), 0)

    def first(self, request: Request) -> list[FirstToken]:
        """The first token of each choice."""
        finish = FinishReason.LENGTH if request.sampling.max_tokens == 1 else None
        if self.first_stops:
            finish = FinishReason.STOP
        return [
            FirstToken(c, token(request.prompt_ids, c, len(request.emitted_ids)), None, finish) for c in request.choices
        ]

    async def generate(self, reservation: Reservation, first: Sequence[FirstToken] = ()) -> None:
        assert isinstance(reservation, ScriptedReservation)
        self.generated.append((reservation.request, first, reservation.cached_tokens))
        reservation.task = asyncio.create_task(self._generate(reservation.request, bool(first)))

    async def _generate(self, request: Request, skip_first: bool) -> None:
        start = len(request.emitted_ids) + skip_first
        for i in range(start, request.sampling.max_tokens):
            await self.step()
            finish = FinishReason.LENGTH if i + 1 == request.sampling.max_tokens else None
            self.queue.put_nowait(
                [
                    TokenEvent(request.uid, request.attempt, c, i, (token(request.prompt_ids, c, i),), (), finish)
                    for c in request.choices
                ]
            )

    async def events(self) -> AsyncIterator[list[TokenEvent]]:  # type: ignore[override]
        while True:
            events = await self.queue.get()
            if isinstance(events, BatonError):
                raise events
            yield events

    async def cache_events(self) -> AsyncIterator[list[CacheEvent]]:  # type: ignore[override]
        await asyncio.Event().wait()
        yield []

    @contextlib.asynccontextmanager
    async def hold(self, keys: Sequence[bytes]) -> AsyncIterator[Sequence[Handle]]:
        self.held.append(list(keys))
        try:
            yield [Handle(key, LAYOUT.digest(), "p", 1, 1, BLOCK, (), 0) for key in keys if key in self.cached]
        finally:
            self.held.pop()

    async def embed(self, ids: Sequence[int], deadline: float, *, batch: bool = False) -> bytes:
        self.embedding.append(len(ids))
        self.lined += [len(ids)] if batch else []
        try:
            await self.step()
            if self.fail_reserve is not None:
                raise self.fail_reserve
            return struct.pack("<f", sum(ids))
        finally:
            self.embedding.remove(len(ids))

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.live), step_started=self.stopped_at)

    async def check_integrity(self) -> list[str]:
        return [f"{r.request.uid} is held" for r in self.live]

    async def clear_cache(self) -> int:
        return 0

    async def close(self) -> None:
        pass
