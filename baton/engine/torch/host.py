"""The torch engine as a worker process sees it: an `Engine` whose model runs in a process of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog

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
    SealedBlocks,
    TokenEvent,
    TokenLogprob,
)
from baton.engine.torch import messages as m
from baton.engine.torch.link import Link
from baton.engine.torch.options import Options
from baton.engine.torch.page import StatsPage
from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment
from baton.kv.keys import block_keys, chain
from baton.transfer.port import BlockRead, ReadReport

START_S = 300.0
"""Reading the weights of a large model from a slow disk."""
CALL_S = 60.0
QUARANTINE_CAP = 0.25
"""Above this share of the pool waiting for late reads the engine gives up: a new epoch starts with every slot."""
MAX_CACHE_EVENTS = 1024

_log = structlog.get_logger()


class TorchEngine(Engine):
    """One model in one child process, one arena of KV blocks shared with it.

    `arena_bytes` is rounded down to whole blocks. `core` pins the child to one CPU core. `owner` and `epoch` go into
    every handle.
    """

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
        self._calls = 0
        self._quarantined: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cached_keys: dict[bytes, None] = {}
        self._cache_events: asyncio.Queue[CacheEvent | None] = asyncio.Queue(MAX_CACHE_EVENTS)
        self._steps: asyncio.Queue[list[TokenEvent] | BatonError] = asyncio.Queue()

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

    async def start(self) -> EngineSpec:
        ours, theirs = socket.socketpair()
        options = replace(self._options, socket_fd=theirs.fileno(), page_fd=self._page.fd)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "baton.engine.torch.child",
                msgspec.json.encode(options).decode(),
                pass_fds=(theirs.fileno(), self.arena.fd, self._page.fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        self._link = Link(process, reader, writer)
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
        self._link.run(self._take, self._died)
        return self._spec

    # ---- what the child says

    def _take(self, message: m.ToWorker) -> None:
        if isinstance(message, m.Step):
            self._steps.put_nowait([_token_event(token) for token in message.tokens])
        elif isinstance(message, m.CacheChange):
            for key in message.stored:
                self._cached_keys[key] = None
            for key in message.removed:
                self._cached_keys.pop(key, None)
            self._tell_cache(CacheEvent(tuple(message.stored), tuple(message.removed)))

    def _tell_cache(self, event: CacheEvent) -> None:
        try:
            self._cache_events.put_nowait(event)
        except asyncio.QueueFull:
            # Nobody kept up: what is queued is worth less than the state now.
            while not self._cache_events.empty():
                self._cache_events.get_nowait()
            self._cache_events.put_nowait(CacheEvent(tuple(self._cached_keys), cleared=True))

    def _died(self, error: BatonError) -> None:
        self._steps.put_nowait(error)
        if self._cache_events.full():
            self._cache_events.get_nowait()
        self._cache_events.put_nowait(None)

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        while True:
            step = await self._steps.get()
            if isinstance(step, BatonError):
                self._steps.put_nowait(step)  # every later consumer meets it too
                raise step
            yield step

    async def cache_events(self) -> AsyncIterator[list[CacheEvent]]:
        while True:
            queued = [await self._cache_events.get()]
            while not self._cache_events.empty():
                queued.append(self._cache_events.get_nowait())
            events = [event for event in queued if event is not None]
            if events:
                yield events
            if None in queued:
                self._cache_events.put_nowait(None)  # every later consumer meets the end too
                return

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
        job = self.next_call()
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
        return TorchReservation(self, job, request, names, len(prompt), answer.slots, answer.hit_tokens)

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
                    yield _prefill_done(message, ours.hit_tokens)
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
        size = self.spec.fingerprint.block_bytes
        return Handle(
            key=block.key,
            fingerprint=self.spec.fingerprint.digest(),
            owner=self.owner,
            epoch=self.epoch,
            generation=block.generation,
            tokens=block.tokens,
            segments=(Segment(0, block.slot * size, size),),
            checksum=block.checksum,
        )

    def next_call(self) -> int:
        """A number that no job and no call to the child had before."""
        self._calls += 1
        return self._calls

    # ---- late reads

    def own(self, task: asyncio.Task[None]) -> None:
        """Keep a task of a reservation that outlives it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def quarantine(self, slots: Sequence[int]) -> None:
        """Count slots that late reads may write to. Above the cap the engine is given up."""
        self._quarantined.update(slots)
        if len(self._quarantined) > QUARANTINE_CAP * self.spec.pool_blocks:
            self.link.fail(BatonError(Reason.ENGINE_FAILED, f"{len(self._quarantined)} slots wait for late reads"))

    def settle(self, slots: Sequence[int]) -> None:
        """These late reads are over."""
        self._quarantined.difference_update(slots)
        self.link.tell(m.Settle(list(slots)))

    # ---- state

    def stats(self) -> EngineStats:
        return self._page.read()

    async def check_integrity(self) -> list[str]:
        call = self.next_call()
        answer = await self.link.ask(call, m.Check(call), CALL_S)
        assert isinstance(answer, m.Answer)
        waiting = [f"slot {slot} waits for a late read" for slot in sorted(self._quarantined)]
        return answer.findings + waiting

    async def clear_cache(self) -> int:
        call = self.next_call()
        answer = await self.link.ask(call, m.Clear(call), CALL_S)
        assert isinstance(answer, m.Answer)
        return answer.count

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._link is not None:
            await self._link.close()


class TorchReservation(Reservation):
    """Slots of one request in the child's pool. `names` are the keys of the prompt's blocks, partial tail included."""

    def __init__(
        self,
        engine: TorchEngine,
        job: int,
        request: Request,
        names: list[bytes],
        prompt_tokens: int,
        slots: list[int],
        hit_tokens: int,
    ) -> None:
        self.request = request
        self.job = job
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = hit_tokens
        self.hit_tokens = hit_tokens
        self._engine = engine
        self._names = names
        self._slots = slots
        self._reading: tuple[asyncio.Task[ReadReport], list[int]] | None = None
        """The read under way, and the prompt blocks that it writes."""
        self._moved = False
        """A read was abandoned: the engine has given its blocks other slots since."""
        self._released = False

    async def load(self, first_block: int, handles: Sequence[Handle], reader: Reader, deadline: float) -> ReadReport:
        if self._released or self._reading is not None:
            raise BatonError(Reason.ABORTED, "the reservation is released, or another load is under way")
        if self._moved:
            await self._swap([])
        size = self._engine.spec.block_size
        have = -(-self.cached_tokens // size)
        gap = first_block > have  # nothing after it can be used
        reasons = [
            Reason.KV_BAD_HANDLE if gap else self._refusal(number, handle, have)
            for number, handle in enumerate(handles, start=first_block)
        ]
        bad = next((i for i, reason in enumerate(reasons) if reason is not None), len(handles))
        skipped = min(max(0, have - first_block), bad)
        blocks = [BlockRead(handle, 0, None) for handle in handles[:skipped]]
        report = ReadReport((), 0, 0.0)
        if skipped < bad:
            report = await self._read(
                list(range(first_block + skipped, first_block + bad)), handles[skipped:bad], reader, deadline
            )
            good = report.verified_prefix()
            if good:
                self.cached_tokens = (first_block + skipped + good - 1) * size + handles[skipped + good - 1].tokens
                self._engine.link.tell(m.Commit(self.job, self.cached_tokens))
            await self._swap_late(report)
        refused = [BlockRead(handle, 0, reasons[bad]) for handle in handles[bad:]]
        return replace(report, blocks=[*blocks, *report.blocks, *refused])

    def _refusal(self, number: int, handle: Handle, have: int) -> Reason | None:
        """Why a handle cannot be read into prompt block `number`, when `have` blocks are in place."""
        spec = self._engine.spec
        if number < have:
            return None
        if handle.fingerprint != spec.fingerprint.digest():
            return Reason.KV_LAYOUT_MISMATCH
        tokens = min(spec.block_size, self.prompt_tokens - number * spec.block_size)
        good = number < len(self._names) and (handle.key, handle.tokens) == (self._names[number], tokens)
        if not good or handle.length != spec.fingerprint.block_bytes:
            return Reason.KV_BAD_HANDLE
        if number >= len(self._slots):
            return Reason.NO_CAPACITY  # its slot went to quarantine and there was no other
        return None

    def _offset(self, number: int) -> int:
        return self._slots[number] * self._engine.spec.fingerprint.block_bytes

    async def _read(self, numbers: list[int], handles: Sequence[Handle], reader: Reader, deadline: float) -> ReadReport:
        """The read itself. When the caller is cancelled, its slots leave the reservation until the read is over."""
        offsets = [self._offset(number) for number in numbers]
        task = asyncio.create_task(reader.read(handles, offsets, deadline), name="kv read")
        self._reading = task, numbers
        try:
            report = await asyncio.shield(task)
        except BaseException:
            self._abandon()
            raise
        if self._reading is None:
            raise BatonError(Reason.ABORTED, "the reservation was released while its KV was being read")
        self._reading = None
        return report

    def _abandon(self) -> None:
        """Nobody waits for the read under way any more, but it may write yet: its slots wait for it in quarantine."""
        if self._reading is None:
            return
        task, numbers = self._reading
        self._reading = None
        slots = [self._slots[number] for number in numbers]
        self._moved = True
        self._engine.quarantine(slots)
        self._engine.link.tell(m.Swap(self.job, self._engine.next_call(), numbers))
        self._engine.own(asyncio.create_task(self._outlive(task, slots), name="late kv read"))

    async def _outlive(self, read: asyncio.Task[ReadReport], slots: list[int]) -> None:
        try:
            report = await read
            if report.settled is not None:
                await asyncio.shield(report.settled)
        except Exception:
            _log.exception("an abandoned read failed")
        finally:
            self._engine.settle(slots)

    async def _swap_late(self, report: ReadReport) -> None:
        """Late slots are exchanged for new ones and quarantined until the read has settled."""
        if not report.late or report.settled is None:
            return
        block_bytes = self._engine.spec.fingerprint.block_bytes
        late = [offset // block_bytes for offset in report.late]
        self._engine.quarantine(late)
        self._engine.own(asyncio.create_task(self._settle_late(report.settled, late), name="late kv read"))
        await self._swap([self._slots.index(slot) for slot in late])

    async def _swap(self, blocks: list[int]) -> None:
        self._moved = True  # until the answer is here: a cancelled caller leaves us without it
        call = self._engine.next_call()
        answer = await self._engine.link.ask(call, m.Swap(self.job, call, blocks), CALL_S)
        assert isinstance(answer, m.Swapped)
        self._slots = answer.slots
        self._moved = False

    async def _settle_late(self, settled: asyncio.Future[None], slots: list[int]) -> None:
        try:
            await asyncio.shield(settled)
        finally:
            self._engine.settle(slots)

    async def release(self) -> None:
        if self._released:
            return
        self._released = True
        self._abandon()
        self._engine.link.tell(m.Release(self.job))


def _own(reservation: Reservation) -> TorchReservation:
    if not isinstance(reservation, TorchReservation):
        raise TypeError(f"a {type(reservation).__name__} is no reservation of this engine")
    return reservation


def _logprob(entry: m.Logprob | None) -> TokenLogprob | None:
    if entry is None:
        return None
    token, value, top = entry
    return TokenLogprob(token, value, tuple((t, v) for t, v in top))


def _token_event(token: m.Token) -> TokenEvent:
    return TokenEvent(
        token.uid,
        token.attempt,
        token.choice,
        token.offset,
        tuple(token.ids),
        tuple(entry for entry in map(_logprob, token.logprobs) if entry is not None),
        FinishReason(token.finish) if token.finish else None,
        Reason.from_name(token.error) if token.error else None,
        token.message,
    )


def _prefill_done(message: m.Prefilled, cached_tokens: int) -> PrefillDone:
    first = tuple(
        FirstToken(choice, token, _logprob(entry), FinishReason(finish) if finish else None)
        for choice, token, finish, entry in message.first
    )
    return PrefillDone(first, cached_tokens, tuple(map(_logprob, message.prompt_logprobs)))
