"""An OpenAI-compatible server as an engine: each choice of a request is one streamed completion over HTTP.

It has no KV of ours: `load` refuses, `prefill` cannot be asked for, nothing is cached here. Choices beyond
`max_streams` wait in line; `EVENTS` events that the worker has not taken hold the streams back, and so the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog

from baton.engine.needs import needs
from baton.engine.openai.client import Upstream
from baton.engine.openai.health import Health
from baton.engine.openai.join import join
from baton.engine.openai.options import UpstreamOptions
from baton.engine.openai.runs import Runs
from baton.engine.port import (
    CacheEvent,
    Engine,
    EngineSpec,
    EngineStats,
    FirstToken,
    PrefillEvent,
    Reader,
    Request,
    Reservation,
    Resume,
    TokenEvent,
)
from baton.errors import BatonError, Reason
from baton.kv.handle import Handle
from baton.kv.keys import BLOCK_SIZE
from baton.model.card import Model
from baton.rpc.tasks import Background
from baton.transfer.port import BlockRead, ReadReport

EVENTS = 1024
WAITING_TIMES = 8
"""So many times `max_streams` may be here, those that wait included; as the torch engine takes them."""
UNWELL_STEP_S = 0.001
_UPSTREAM_AT_FAULT = frozenset({Reason.DECODE_UNAVAILABLE, Reason.ENGINE_FAILED})

_log = structlog.get_logger()


class UpstreamReservation(Reservation):
    """A request that may start. Nothing is held for it but its place in line."""

    def __init__(self, engine: OpenAIEngine, request: Request) -> None:
        self.request = request
        self.cached_tokens = 0
        self.hit_tokens = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._engine = engine

    async def load(self, first_block: int, handles: Sequence[Handle], reader: Reader, deadline: float) -> ReadReport:
        """Refuses every block."""
        return ReadReport([BlockRead(handle, 0, Reason.KV_LAYOUT_MISMATCH) for handle in handles], 0, 0.0)

    async def release(self) -> None:
        """Close the connections of what still streams."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self._engine.forget(self)


class OpenAIEngine(Engine):
    """`model` is the text side of what the server runs: its prompts are tokenised with it."""

    def __init__(self, options: UpstreamOptions, model: Model) -> None:
        self._options = options
        self._model = model
        self._upstream = Upstream(options.url, options.model, api_key=options.api_key)
        self._health = Health(self._upstream)
        self._background = Background("upstream")
        self._runs: Runs | None = None
        self._spec: EngineSpec | None = None
        self._live: dict[tuple[str, int], UpstreamReservation] = {}
        self._events: asyncio.Queue[TokenEvent | BatonError] = asyncio.Queue(EVENTS)

    async def start(self) -> EngineSpec:
        joined = await join(self._upstream, self._options, self._model.tokenizer)
        self._runs = Runs(self._upstream, self._options, joined, self._model.tokenizer, self._health.heard)
        self._background.spawn(self._health.run(), "health")
        self._spec = EngineSpec(
            name="openai",
            fingerprint=None,
            block_size=BLOCK_SIZE,
            max_context=joined.max_context or self._model.context_length,
            max_streams=self._options.max_streams,
            pool_blocks=0,
            vocab_size=self._model.tokenizer.vocab_size,
            resume=Resume.TEXT,
            eos_token_ids=self._model.generation.eos_ids,
            lacks=joined.dialect.lacks,
        )
        return self._spec

    @property
    def spec(self) -> EngineSpec:
        """Known once started. Raises BatonError(ENGINE_FAILED) before."""
        if self._spec is None:
            raise BatonError(Reason.ENGINE_FAILED, "the upstream has not been joined")
        return self._spec

    @property
    def runs(self) -> Runs:
        """What streams. Raises BatonError(ENGINE_FAILED) before `start`."""
        if self._runs is None:
            raise BatonError(Reason.ENGINE_FAILED, "the upstream has not been joined")
        return self._runs

    async def reserve(self, request: Request, *, decode_room: bool = True) -> Reservation:
        self._check(request)
        reservation = UpstreamReservation(self, request)
        self._live[request.uid, request.attempt] = reservation
        return reservation

    def prefill(self, reservation: Reservation) -> AsyncIterator[PrefillEvent]:
        raise BatonError(Reason.INVALID_REQUEST, "an upstream server hands no KV over: it only runs merged")

    async def generate(self, reservation: Reservation, first: Sequence[FirstToken] = ()) -> None:
        if first:
            raise BatonError(Reason.INVALID_REQUEST, "an upstream server does not go on from a first token alone")
        assert isinstance(reservation, UpstreamReservation)
        for choice in reservation.request.choices:
            task = self._background.spawn(self._run(reservation.request, choice), f"{reservation.request.uid}/{choice}")
            reservation.tasks.append(task)
            task.add_done_callback(lambda _: self._ended(reservation))

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        while True:
            step = [await self._events.get()]
            while not self._events.empty():
                step.append(self._events.get_nowait())
            yield [event for event in step if isinstance(event, TokenEvent)]
            for event in step:
                if isinstance(event, BatonError):
                    raise event

    async def cache_events(self) -> AsyncIterator[list[CacheEvent]]:
        await asyncio.Event().wait()  # whatever it caches, it does not tell
        yield []

    @contextlib.asynccontextmanager
    async def hold(self, keys: Sequence[bytes]) -> AsyncIterator[Sequence[Handle]]:
        yield ()

    def stats(self) -> EngineStats:
        # An upstream that is away is a step that does not end: frontends and routers know what to do then.
        return replace(
            self.runs.stats(),
            step_started=self._health.since,
            step_predicted_s=UNWELL_STEP_S if self._health.why else 0.0,
        )

    @property
    def unwell(self) -> str:
        return self._health.why

    async def check_integrity(self) -> list[str]:
        found = [f"{uid}/{attempt} streams from the upstream" for uid, attempt in self._live]
        stats = self.runs.stats()
        held = {"running": stats.running, "waiting": stats.waiting, "prompt tokens": stats.queued_prefill_tokens}
        if not self._live:
            found += [f"{count} {what}, but no request is here" for what, count in held.items() if count]
        return found

    async def clear_cache(self) -> int:
        return 0

    async def close(self) -> None:
        await self._background.close()
        await self._upstream.close()
        if self._events.full():
            self._events.get_nowait()
        self._events.put_nowait(BatonError(Reason.ENGINE_FAILED, "the engine was closed"))

    def forget(self, reservation: UpstreamReservation) -> None:
        """It was released. Idempotent."""
        key = (reservation.request.uid, reservation.request.attempt)
        if self._live.get(key) is reservation:
            del self._live[key]

    def _ended(self, reservation: UpstreamReservation) -> None:
        if all(task.done() for task in reservation.tasks):
            self.forget(reservation)

    def _check(self, request: Request) -> None:
        """Raises BatonError as `Engine.reserve` says."""
        spec, tokens = self.spec, len(request.prompt_ids) + len(request.emitted_ids)
        if (request.uid, request.attempt) in self._live:
            raise BatonError(Reason.DUPLICATE_REQUEST, f"attempt {request.attempt} of {request.uid} is running here")
        if tokens >= spec.max_context:
            message = f"{tokens} prompt tokens leave no room in a context of {spec.max_context}"
            raise BatonError(Reason.CONTEXT_LENGTH_EXCEEDED, message, param="prompt_ids")
        for name, ids in (("prompt_ids", request.prompt_ids), ("emitted_ids", request.emitted_ids)):
            if any(not 0 <= token < spec.vocab_size for token in ids):
                message = f"{name} has ids outside the vocabulary of {spec.vocab_size}"
                raise BatonError(Reason.INVALID_REQUEST, message, param=name)
        lacking = sorted(needs(request.sampling) & spec.lacks)
        if lacking:
            message = f"the upstream cannot do {', '.join(lacking)}"
            raise BatonError(Reason.INVALID_REQUEST, message, param=lacking[0])
        if len(self._live) >= WAITING_TIMES * self._options.max_streams:
            raise BatonError(Reason.NO_CAPACITY, f"{len(self._live)} requests are with the upstream or wait for it")

    async def _run(self, request: Request, choice: int) -> None:
        """One choice, from its place in line to its last event. Its failure is an event, too."""
        try:
            async with aclosing(self.runs.run(request, choice)) as events:
                async for event in events:
                    await self._events.put(event)
        except BatonError as error:
            if error.reason in _UPSTREAM_AT_FAULT:
                self._health.doubt()
            await self._events.put(_failed(request, choice, error))
        except Exception as error:
            _log.exception("a stream failed unexpectedly", uid=request.uid)
            told = BatonError(Reason.ENGINE_FAILED, f"{type(error).__name__} while asking the upstream")
            await self._events.put(_failed(request, choice, told))


def _failed(request: Request, choice: int, error: BatonError) -> TokenEvent:
    return TokenEvent(request.uid, request.attempt, choice, 0, error=error.reason, message=error.message)
