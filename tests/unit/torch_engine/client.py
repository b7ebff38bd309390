"""What a worker does with an engine, in a few lines: route events to requests, hand KV from one engine to another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from baton.engine.port import (
    FinishReason,
    FirstToken,
    PrefillDone,
    PrefillEvent,
    Reader,
    Request,
    Reservation,
    SamplingParams,
    SealedBlocks,
    TokenEvent,
    TokenLogprob,
)
from baton.engine.torch.host import TorchEngine
from baton.errors import BatonError, Reason
from baton.kv.handle import Handle, checksum
from baton.transfer.port import BlockRead, ReadReport

HANG_S = 60.0
ROOT = b"test-root-bytes!"
_uids = itertools.count()


def request(
    prompt: Sequence[int],
    *,
    max_tokens: int = 16,
    choices: tuple[int, ...] = (0,),
    emitted: Sequence[int] = (),
    deadline_s: float = 120.0,
    uid: str = "",
    root: bytes = ROOT,
    **sampling: Any,
) -> Request:
    """Greedy and deaf to end-of-text unless told otherwise."""
    params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "seed": 11, "max_tokens": max_tokens} | sampling
    uid = uid or f"r{next(_uids)}"
    return Request(
        uid, 1, list(prompt), SamplingParams(**params), root, time.time() + deadline_s, choices, list(emitted)
    )


@dataclass
class Output:
    """What one choice has given."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None


class Stream:
    """One request's events, checked as they come."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outputs = {choice: Output(list(request.emitted_ids)) for choice in request.choices}
        self.error: BatonError | None = None
        self.done = asyncio.Event()
        self.moved = asyncio.Event()

    def take(self, event: TokenEvent) -> None:
        """Offsets must join without gap or repetition, and nothing comes after the end."""
        if event.error is not None:
            self.error = BatonError(event.error, event.message)
            self.done.set()
            return
        output = self.outputs[event.choice]
        assert output.finish is None, "an event after the end"
        assert event.offset == len(output.tokens)
        output.tokens += event.token_ids
        output.logprobs += event.logprobs
        output.finish = event.finish
        self.moved.set()
        self.check_done()

    def take_first(self, first: Sequence[FirstToken]) -> None:
        """Tokens drawn where the prompt was computed."""
        for token in first:
            output = self.outputs[token.choice]
            if token.finish is not FinishReason.STOP:
                output.tokens.append(token.token_id)
            output.finish = token.finish
        self.check_done()

    def check_done(self) -> None:
        if all(o.finish is not None for o in self.outputs.values()):
            self.done.set()

    async def result(self) -> dict[int, Output]:
        """Wait for the end. Raises the error that the engine gave."""
        async with asyncio.timeout(HANG_S):
            await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.outputs

    async def tokens(self) -> list[int]:
        """Of the only choice."""
        (output,) = (await self.result()).values()
        return output.tokens


class Client:
    """An engine and who listens to it."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.streams: dict[tuple[str, int], Stream] = {}
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        with contextlib.suppress(BatonError):
            async for events in self.engine.events():
                for event in events:
                    stream = self.streams.get((event.uid, event.attempt))
                    if stream is not None:
                        stream.take(event)

    def listen(self, request: Request) -> Stream:
        """Before generating."""
        stream = self.streams[request.uid, request.attempt] = Stream(request)
        return stream

    async def generate(self, reservation: Reservation, first: Sequence[FirstToken] = ()) -> Stream:
        """Start; `first` counts as received."""
        stream = self.listen(reservation.request)
        stream.take_first(first)
        await self.engine.generate(reservation, first)
        return stream

    async def submit(self, request: Request) -> Stream:
        """Reserve and generate. The engine releases when it ends."""
        return await self.generate(await self.engine.reserve(request))

    async def complete(self, request: Request) -> list[int]:
        """A whole request of one choice."""
        return await (await self.submit(request)).tokens()

    async def prefill(self, reservation: Reservation) -> tuple[list[Handle], PrefillDone]:
        """All handles in prompt order, and the end."""
        handles: list[Handle] = []
        async with asyncio.timeout(HANG_S):
            async for event in self.engine.prefill(reservation):
                if isinstance(event, PrefillDone):
                    return handles, event
                assert event.first_block == len(handles)
                handles += event.handles
        raise AssertionError("prefill ended without PrefillDone")

    async def first_blocks(self, reservation: Reservation) -> tuple[AsyncGenerator[PrefillEvent, None], SealedBlocks]:
        """Start a prefill and leave it at its first announcement."""
        events = cast("AsyncGenerator[PrefillEvent, None]", self.engine.prefill(reservation))
        event = await anext(events)
        assert isinstance(event, SealedBlocks)
        return events, event

    async def idle(self) -> None:
        """Wait until nothing is held. Raises AssertionError with the findings when that does not come."""
        end = time.monotonic() + HANG_S
        while findings := await self.engine.check_integrity():
            assert time.monotonic() < end, findings
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.engine.close()
        await self._task


class ArenaReader(Reader):
    """Reads from another engine's arena, and verifies. Tests break it in ways that a network does."""

    def __init__(self, source: TorchEngine, into: TorchEngine) -> None:
        self._source = source
        self._into = into
        self.verify = True
        self.reads = 0
        self.fail: dict[int, Reason] = {}
        """By position in the batch: what becomes of a block instead."""
        self.gate: asyncio.Event | None = None
        """A read waits here with its bytes still to come."""
        self.late: asyncio.Future[None] | None = None
        """Failed blocks are late until this is done."""

    async def read(self, handles: Sequence[Handle], into: Sequence[int], deadline: float) -> ReadReport:
        self.reads += 1
        if self.gate is not None:
            await self.gate.wait()
        blocks = []
        for i, (handle, offset) in enumerate(zip(handles, into, strict=True)):
            reason = self.fail.get(i)
            if reason is None:
                (segment,) = handle.segments
                payload = bytes(self._source.arena.view(segment.offset, segment.length))
                self._into.arena.view(offset, len(payload))[:] = payload
                if self.verify and checksum(handle.key, handle.epoch, handle.generation, payload) != handle.checksum:
                    reason = Reason.KV_CHECKSUM_MISMATCH
            blocks.append(BlockRead(handle, offset, reason))
        late = [b.offset for b in blocks if b.reason is not None] if self.late is not None else []
        size = sum(b.handle.length for b in blocks if b.reason is None)
        return ReadReport(blocks, size, 0.001, late, self.late)


async def hand_over(source: Client, target: Client, asked: Request) -> tuple[Stream, PrefillDone]:
    """One disaggregated request: prefill there, load here, go on from token 2."""
    there = await source.engine.reserve(asked, decode_room=False)
    here = await target.engine.reserve(replace(asked, attempt=asked.attempt))
    try:
        handles, done = await source.prefill(there)
        report = await here.load(0, handles, ArenaReader(source.engine, target.engine), time.monotonic() + 10)
        assert [b.reason for b in report.blocks] == [None] * len(handles)
        stream = await target.generate(here, done.first)
        return stream, done
    finally:
        await there.release()
