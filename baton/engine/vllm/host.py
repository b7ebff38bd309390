"""The vLLM engine as a worker process sees it: AsyncLLM here, vLLM's EngineCore in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from baton.engine.admission import Limits, validate
from baton.engine.feeds import CacheFeed, StepFeed
from baton.engine.late import LateReads
from baton.engine.liveness import Liveness, patient
from baton.engine.page import StatsPage
from baton.engine.port import (
    CacheEvent,
    Engine,
    EngineSpec,
    EngineStats,
    FirstToken,
    PrefillEvent,
    Request,
    Reservation,
    TokenEvent,
)
from baton.engine.vllm import messages as m
from baton.engine.vllm.launch import build, describe
from baton.engine.vllm.link import Listener
from baton.engine.vllm.options import VllmOptions
from baton.engine.vllm.reservation import VllmReservation
from baton.engine.vllm.staging import Staging
from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle
from baton.kv.keys import block_keys
from baton.kv.pool import PoolFull

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from baton.engine.vllm.jobs import Jobs

START_S = 600.0
CLOSE_S = 3.0
ENDING_S = 10.0
"""How long the leak check waits for vLLM to have ended what was released."""
JOBS_PER_STREAM = 8

_log = structlog.get_logger()


class VllmEngine(Engine):
    """One vLLM engine, and one arena of staged KV blocks shared with its processes. See README.md beside this file.

    `owner` and `epoch` go into every handle.
    """

    arena: Arena

    def __init__(self, options: VllmOptions, *, epoch: int, owner: str) -> None:
        self.arena = Arena.create(options.pool_bytes)
        self._options = options
        self._epoch = epoch
        self._owner = owner
        self._page = StatsPage.create()
        self._listener = Listener(self.arena.fd, self._page.fd, self._take, self._gone)
        self._ranks: list[m.Rank] = []
        self._llm: AsyncLLM | None = None
        self._spec: EngineSpec | None = None
        self._parts: tuple[Staging, LateReads, Jobs] | None = None
        self._liveness: Liveness | None = None
        self._steps = StepFeed()
        self._cache = CacheFeed()
        self._live: dict[tuple[str, int], VllmReservation] = {}
        self._error: BatonError | None = None
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0

    @property
    def spec(self) -> EngineSpec:
        """Known once started. Raises BatonError(ENGINE_FAILED) before."""
        if self._spec is None:
            raise BatonError(Reason.ENGINE_FAILED, "the engine has not been started")
        return self._spec

    @property
    def _started(self) -> tuple[Staging, LateReads, Jobs]:
        if self._parts is None:
            raise BatonError(Reason.ENGINE_FAILED, "the engine has not been started")
        if self._error is not None:
            raise self._error
        return self._parts

    async def start(self) -> EngineSpec:
        options = self._options
        if importlib.util.find_spec("vllm") is None:
            raise BatonError(
                Reason.ENGINE_FAILED,
                "vLLM is not installed in this environment (`make vllm-env` makes one that has it)",
            )
        await self._listener.start()
        try:
            async with asyncio.timeout(START_S):
                # Half a minute, and it blocks: the loop must take the connections of the processes that it starts.
                self._llm = await asyncio.to_thread(build, options, self._listener.path)
        except BatonError:
            raise
        except Exception as error:
            raise BatonError(Reason.ENGINE_FAILED, f"vLLM did not start: {type(error).__name__}: {error}") from error
        from baton.engine.vllm.jobs import Jobs  # imports vLLM

        self._spec = spec = describe(options, self._llm, self._ranks, self.arena.size)
        staging = Staging(self.arena, spec.layout, self._owner, self._epoch, self._cache.tell)
        late = LateReads(staging.settle, self._fail, spec.pool_blocks)
        tell = self._listener.spare
        jobs = Jobs(self._llm, spec, staging, self._steps, len(self._ranks), self._ended, tell)
        self._parts = staging, late, jobs
        self._liveness = Liveness(self._ranks[0].pid)
        return spec

    # ---- what vLLM's processes say

    def _take(self, message: m.FromVllm) -> None:
        if isinstance(message, m.Rank):
            self._ranks.append(message)
        elif self._parts is not None and not isinstance(message, m.Scheduler):
            self._parts[2].take(message)

    def _gone(self, message: str) -> None:
        self._fail(BatonError(Reason.ENGINE_FAILED, message))

    def _fail(self, error: BatonError) -> None:
        """Give the engine up: its processes follow when ours ends."""
        if self._error is not None:
            return
        self._error = error
        if self._parts is not None:
            self._parts[2].fail(error)
        self._steps.fail(error)
        self._cache.end()

    def events(self) -> AsyncIterator[list[TokenEvent]]:
        return self._steps.stream()

    def cache_events(self) -> AsyncIterator[list[CacheEvent]]:
        return self._cache.stream()

    # ---- requests

    async def reserve(self, request: Request, *, decode_room: bool = True) -> Reservation:
        staging, late, _ = self._started
        spec = self.spec
        prompt = [*request.prompt_ids, *request.emitted_ids]
        validate(request, prompt, self._limits())
        name = request.uid, request.attempt
        if name in self._live:
            raise BatonError(Reason.DUPLICATE_REQUEST, f"{name[0]}/{name[1]} is already here", param="uid")
        if len(self._live) >= spec.max_streams * JOBS_PER_STREAM:
            raise BatonError(Reason.NO_CAPACITY, f"{len(self._live)} requests are here already")
        keys = block_keys(request.key_root, prompt, spec.block_size)
        hits = 0 if request.sampling.prompt_logprobs is not None else (len(prompt) - 1) // spec.block_size
        try:
            room = staging.take(keys, hits)
        except PoolFull as full:
            raise BatonError(Reason.NO_CAPACITY, str(full)) from full
        reservation = VllmReservation(spec, late, staging, room, request, self._forget)
        self._live[name] = reservation
        self._prompt_tokens += len(prompt)
        self._cached_prompt_tokens += reservation.hit_tokens
        return reservation

    def _limits(self) -> Limits:
        spec = self.spec
        return Limits(
            block_size=spec.block_size,
            chunk_tokens=self._options.chunk_tokens,
            max_streams=spec.max_streams,
            max_jobs=spec.max_streams * JOBS_PER_STREAM,
            max_context=spec.max_context,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
        )

    def _forget(self, reservation: VllmReservation) -> None:
        """A reservation ends: so does what runs for it."""
        self._live.pop((reservation.request.uid, reservation.request.attempt), None)
        if self._parts is not None:
            self._parts[2].stop(reservation)

    def _ended(self, reservation: VllmReservation) -> None:
        """Every choice has finished."""
        reservation.end()

    def prefill(self, reservation: Reservation) -> AsyncIterator[PrefillEvent]:
        return self._started[2].prefill(_own(reservation))

    async def generate(self, reservation: Reservation, first: Sequence[FirstToken] = ()) -> None:
        jobs = self._started[2]
        ours = _own(reservation)
        if first and sorted(token.choice for token in first) != sorted(ours.request.choices):
            raise BatonError(Reason.INVALID_REQUEST, "first tokens must be of every choice, or of none", param="first")
        if any(not 0 <= token.token_id < self.spec.vocab_size for token in first):
            raise BatonError(Reason.INVALID_REQUEST, "a token id is outside the vocabulary", param="first")
        jobs.generate(ours, first)

    @asynccontextmanager
    async def hold(self, keys: Sequence[bytes]) -> AsyncIterator[Sequence[Handle]]:
        staging = self._started[0]
        number, handles = staging.hold(keys)
        try:
            yield handles
        finally:
            staging.unhold(number)

    # ---- state

    def stats(self) -> EngineStats:
        if self._parts is None:
            return EngineStats()
        staging, _, jobs = self._parts
        stats, ended_ms = self._page.read()
        if jobs.oldest and not stats.step_started:
            # It has work and computes nothing: since the last step's end, or since the work came.
            started = max(jobs.oldest, ended_ms / 1000)
            stats = replace(stats, step_started=started, step_predicted_s=stats.decode_step_s)
        elif not jobs.oldest:
            stats = replace(stats, step_started=0.0, step_predicted_s=0.0)
        pool = staging.pool
        stats = replace(
            stats,
            running=jobs.running,
            waiting=jobs.waiting,
            queued_prefill_tokens=jobs.queued_tokens,
            blocks_total=len(pool),
            blocks_free=pool.available,
            blocks_cached=pool.cached,
            blocks_pinned=staging.pinned,
            blocks_quarantined=pool.quarantined,
            prompt_tokens=self._prompt_tokens,
            prefill_tokens_computed=jobs.computed_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            output_tokens=jobs.output_tokens,
            corrupted_blocks=staging.corrupted,
            unstaged_blocks=jobs.unstaged_blocks,
        )
        return patient(stats, self._liveness)

    async def check_integrity(self) -> list[str]:
        staging, late, _ = self._started
        await self._settled()
        live = [f"request {uid}/{attempt} is live" for uid, attempt in self._live]
        return staging.findings() + live + [f"slot {slot} waits for a late read" for slot in sorted(late.slots)]

    async def _settled(self) -> None:
        """Wait, not for ever, until vLLM has ended what was released."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await self._started[0].all_ended()

    async def clear_cache(self) -> int:
        staging = self._started[0]
        await self._settled()
        assert self._llm is not None
        try:
            async with asyncio.timeout(ENDING_S):
                await self._llm.reset_prefix_cache()
        except TimeoutError:
            raise BatonError(Reason.ENGINE_FAILED, f"vLLM said nothing for {ENDING_S:g} s") from None
        return staging.clear()

    async def close(self) -> None:
        if self._parts is not None:
            await self._parts[1].close()
            self._parts[2].stop_all()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.to_thread(llm.shutdown, CLOSE_S)
        await self._listener.close()
        self._fail(BatonError(Reason.ENGINE_FAILED, "the engine was closed"))


def _own(reservation: Reservation) -> VllmReservation:
    if not isinstance(reservation, VllmReservation):
        raise TypeError(f"a {type(reservation).__name__} is no reservation of this engine")
    return reservation
