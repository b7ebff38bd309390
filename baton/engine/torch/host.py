"""The torch engine as a worker process sees it: an `Engine` whose model runs in a process of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog

from baton.engine.feeds import MAX_STEPS, CacheFeed, StepFeed
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
    SealedBlocks,
    TokenEvent,
)
from baton.engine.torch import messages as m
from baton.engine.torch.environment import child_environment
from baton.engine.torch.link import CALL_S, Link
from baton.engine.torch.options import Options
from baton.engine.torch.reservation import TorchReservation
from baton.engine.torch.wire import prefill_done, token_event
from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment
from baton.kv.keys import block_keys, chain

START_S = 300.0
"""Reading the weights of a large model from a slow disk."""

_log = structlog.get_logger()


class TorchEngine(Engine):
    """One model in one child process, one arena of KV blocks shared with it.

    `arena_bytes` is rounded down to whole blocks. `core` pins the child to one CPU core. `owner` and `epoch` go into
    every handle.
    """

    arena: Arena

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "bfloat16",
        arena_bytes: int = 2**30,
        max_streams: int = 64,
        chunk_tokens: int = 256,
        threads: int = 1,
        core: int | None = None,
        epoch: int,
        owner: str,
    ) -> None:
        self.owner = owner
        self.epoch = epoch
        self.arena = Arena.create(arena_bytes)
        self._options = Options(
            str(model_path), dtype, epoch, max_streams, chunk_tokens, threads, core, os.getpid(), -1, self.arena.fd, -1
        )
        self._page = StatsPage.create()
        self._link: Link | None = None
        self._spec: EngineSpec | None = None
        self._late: LateReads | None = None
        self._liveness: Liveness | None = None
        self._cache = CacheFeed()
        self._steps = StepFeed(MAX_STEPS)

    @property
    def link(self) -> Link:
        """The running child. Raises BatonError(ENGINE_FAILED) before `start`."""
        if self._link is None:
            raise BatonError(Reason.ENGINE_FAILED, "the engine has not been started")
        return self._link

    @property
    def spec(self) -> EngineSpec:
        """Known once started. Raises BatonError(ENGINE_FAILED) before."""
        if self._spec is None:
            raise BatonError(Reason.ENGINE_FAILED, "the engine has not been started")
        return self._spec

    @property
    def late(self) -> LateReads:
        """Slots that late reads may write to. Raises BatonError(ENGINE_FAILED) before `start`."""
        if self._late is None:
            raise BatonError(Reason.ENGINE_FAILED, "the engine has not been started")
        return self._late

    async def start(self) -> EngineSpec:
        ours, theirs = socket.socketpair()
        options = replace(self._options, socket_fd=theirs.fileno(), page_fd=self._page.fd)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "baton.engine.torch.child",
                msgspec.json.encode(options).decode(),
                env=child_environment(os.environ),
                pass_fds=(theirs.fileno(), self.arena.fd, self._page.fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        self._link = Link(process, reader, writer)
        self._liveness = Liveness(process.pid)
        try:
            async with asyncio.timeout(START_S):
                first = await self._link.receive()
        except BaseException as error:
            await self._link.close()
            if isinstance(error, (TimeoutError, BatonError)):
                raise BatonError(Reason.ENGINE_FAILED, f"the engine did not start: {error}") from error
            raise
        if not isinstance(first, m.Started):
            await self._link.close()
            message = first.message if isinstance(first, m.StartFailed) else f"unexpected {type(first).__name__}"
            raise BatonError(Reason.ENGINE_FAILED, f"cannot serve {self._options.model}: {message}")
        self._spec = msgspec.msgpack.decode(first.spec, type=EngineSpec)
        self._late = LateReads(self._settle, self._link.fail, self._spec.pool_blocks)
        self._link.run(self._take, self._died)
        return self._spec

    # ---- what the child says

    async def _take(self, message: m.ToWorker) -> None:
        if isinstance(message, m.Step):
            await self._steps.put([token_event(token) for token in message.tokens])
        elif isinstance(message, m.CacheChange):
            self._cache.tell(message.stored, message.removed)

    def _settle(self, slots: Sequence[int]) -> None:
        self.link.tell(m.Settle(list(slots)))

    def _died(self, error: BatonError) -> None:
        self._steps.fail(error)
        self._cache.end()

    def events(self) -> AsyncIterator[list[TokenEvent]]:
        return self._steps.stream()

    def cache_events(self) -> AsyncIterator[list[CacheEvent]]:
        return self._cache.stream()

    # ---- requests

    async def reserve(self, request: Request, *, decode_room: bool = True) -> Reservation:
        size = self.spec.block_size
        # Before ids are packed into keys; the engine process checks the rest.
        self._in_vocabulary("prompt_ids", request.prompt_ids)
        self._in_vocabulary("emitted_ids", request.emitted_ids)
        prompt = [*request.prompt_ids, *request.emitted_ids]
        keys = block_keys(request.key_root, prompt, size)
        tail = len(prompt) % size
        parent = keys[-1] if keys else request.key_root
        tail_key = chain(parent, prompt[-tail:]) if tail else b""
        job = self.link.number()
        encoded = msgspec.msgpack.encode(request)
        try:
            answer = await self.link.ask(job, m.Reserve(job, encoded, keys, tail_key, decode_room), CALL_S)
        except BaseException:
            self.link.tell(m.Release(job))
            raise
        if isinstance(answer, m.Refused):
            raise BatonError(Reason.from_name(answer.reason), answer.message, param=answer.param or None)
        assert isinstance(answer, m.Reserved)
        names = [*keys, tail_key] if tail else keys
        return TorchReservation(self.link, self.spec, self.late, job, request, names, answer.slots, answer.hit_tokens)

    def _in_vocabulary(self, param: str, ids: Sequence[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.spec.vocab_size):
            message = f"a token id is outside 0...{self.spec.vocab_size - 1}"
            raise BatonError(Reason.INVALID_REQUEST, message, param=param)

    async def prefill(self, reservation: Reservation) -> AsyncIterator[PrefillEvent]:
        ours = _own(reservation)
        inbox = self.link.open(ours.job)
        done = False
        try:
            self.link.tell(m.Prefill(ours.job))
            while not done:
                message = await inbox.get()
                if isinstance(message, BatonError):
                    raise message
                if isinstance(message, m.Failed):
                    raise BatonError(Reason.from_name(message.reason), message.message)
                if isinstance(message, m.Sealed):
                    handles = tuple(self._handle(block) for block in message.blocks)
                    yield SealedBlocks(message.first_block, handles)
                elif isinstance(message, m.Prefilled):
                    done = True
                    ours.cached_tokens = ours.prompt_tokens
                    yield prefill_done(message, ours.hit_tokens)
        finally:
            self.link.forget(ours.job)
            if not done:
                self.link.tell(m.StopPrefill(ours.job))

    async def generate(self, reservation: Reservation, first: Sequence[FirstToken] = ()) -> None:
        ours = _own(reservation)
        self.link.check()
        if first and sorted(token.choice for token in first) != sorted(ours.request.choices):
            raise BatonError(Reason.INVALID_REQUEST, "first tokens must be of every choice, or of none", param="first")
        self._in_vocabulary("first", [token.token_id for token in first])
        drawn = [(token.choice, token.token_id) for token in first]
        done = [token.choice for token in first if token.finish is not None]
        self.link.tell(m.Generate(ours.job, drawn, done))

    def _handle(self, block: m.Block) -> Handle:
        size = self.spec.layout.block_bytes
        return Handle(
            key=block.key,
            fingerprint=self.spec.layout.digest(),
            owner=self.owner,
            epoch=self.epoch,
            generation=block.generation,
            tokens=block.tokens,
            segments=(Segment(0, block.slot * size, size),),
            checksum=block.checksum,
        )

    @asynccontextmanager
    async def hold(self, keys: Sequence[bytes]) -> AsyncIterator[Sequence[Handle]]:
        call = self.link.number()
        try:
            answer = await self.link.ask(call, m.Hold(call, list(keys)), CALL_S)
            assert isinstance(answer, m.Held)
            yield [self._handle(block) for block in answer.blocks]
        finally:
            self.link.tell(m.Unhold(call))

    async def embed(self, ids: Sequence[int], deadline: float, *, batch: bool = False) -> bytes:
        self._in_vocabulary("input", ids)
        job = self.link.number()
        inbox = self.link.open(job)
        done = False
        try:
            self.link.tell(m.Embed(job, list(ids), deadline, batch))
            message = await inbox.get()
            done = True
            if isinstance(message, BatonError):
                raise message
            if isinstance(message, m.Failed):
                raise BatonError(Reason.from_name(message.reason), message.message, param="input")
            assert isinstance(message, m.Embedded)
            return message.vector
        finally:
            self.link.forget(job)
            if not done:
                self.link.tell(m.Release(job))

    async def pause_batch(self, seconds: float) -> None:
        self.link.tell(m.PauseBatch(seconds))

    # ---- state

    def stats(self) -> EngineStats:
        stats, taken = self._page.read()
        owed = self._link.owed_since(taken) if self._link is not None else 0.0
        if owed and not stats.step_started:
            # Stopped between two steps, or while it was idle: what was sent is not even read.
            stats = replace(stats, step_started=owed, step_predicted_s=stats.decode_step_s)
        return patient(stats, self._liveness)

    async def check_integrity(self) -> list[str]:
        call = self.link.number()
        answer = await self.link.ask(call, m.Check(call), CALL_S)
        assert isinstance(answer, m.Answer)
        waiting = [f"slot {slot} waits for a late read" for slot in sorted(self.late.slots)]
        return answer.findings + waiting

    async def clear_cache(self) -> int:
        call = self.link.number()
        answer = await self.link.ask(call, m.Clear(call), CALL_S)
        assert isinstance(answer, m.Answer)
        return answer.count

    async def close(self) -> None:
        if self._late is not None:
            await self._late.close()
        if self._link is not None:
            await self._link.close()


def _own(reservation: Reservation) -> TorchReservation:
    if not isinstance(reservation, TorchReservation):
        raise TypeError(f"a {type(reservation).__name__} is no reservation of this engine")
    return reservation
