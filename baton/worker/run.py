"""The prefill side of a hand-over: `PrefillService.Run`, whose life is the lease on the KV.

Reserve or refuse, announce sealed blocks as chunks complete, sample the first token, then hold the call open: while it
is, the blocks stay pinned and readable. The caller closes it when it has what it needs; its death, our drain or the
request's deadline close it too. Whichever way it ends, the `finally` gives everything back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import structlog

from baton.engine.port import PrefillDone, PrefillEvent, Request, Reservation, SealedBlocks
from baton.errors import BatonError, Reason
from baton.kv.keys import block_keys
from baton.rpc.codec import first_token_to_pb, handle_to_pb, logprob_to_pb, request_from_pb
from baton.rpc.errors import failure
from baton.v1 import worker_pb2 as pb
from baton.worker.context import RESERVE_S, WorkerContext, remaining_s
from baton.worker.load import Source, StoreLoader
from baton.worker.offers import Offers
from baton.worker.watch import Watchers

ALIVE_S = 0.4
"""How often a Run whose prompt waits or computes says so, as long as the engine moves."""

_log = structlog.get_logger()
Write = Callable[[pb.RunEvent], Awaitable[None]]


@dataclass(frozen=True)
class _Run:
    """An open run. Our own wish to end it is an event, no cancellation: that would cut a write of its stream in two."""

    name: str
    write: Write
    closing: asyncio.Event


class Runs:
    """The open runs of this process: its leases."""

    def __init__(self, context: WorkerContext, watchers: Watchers, loader: StoreLoader, offers: Offers) -> None:
        self._context = context
        self._loader = loader
        self._offers = offers
        self._watchers = watchers
        self.refusing = False
        """Whether new runs are refused: some time after `draining` was told."""
        self._open: dict[asyncio.Task[None], _Run] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._open)

    async def serve(self, request: pb.RunRequest, write: Write) -> None:
        """One run, from its request to its end. A refusal or failure is told as an event.

        The run is a task of its own, cancelled once, when the caller has closed: a second cancellation cannot interrupt
        what it frees.
        """
        run = _Run(f"{request.attempt.uid}/{request.attempt.attempt}", write, asyncio.Event())
        task = self._context.background.spawn(self._lease(request, run), f"run {run.name}")
        self._open[task] = run
        task.add_done_callback(self._gone)
        self._idle.clear()
        self._changed()
        try:
            await asyncio.shield(task)
        finally:
            task.cancel()

    async def _lease(self, request: pb.RunRequest, run: _Run) -> None:
        end = "closed"
        try:
            with self._context.transports.lease():
                await self._run(request, run)
        except Exception as error:
            if isinstance(error, BatonError):
                failed = error
            else:
                _log.exception("run failed unexpectedly", run=run.name)
                failed = BatonError(Reason.INTERNAL, f"{type(error).__name__} in {self._context.id}: see its log")
            end = failed.reason.name
            _log.info("run ended", run=run.name, reason=end, message=failed.message)
            await run.write(pb.RunEvent(failure=failure(failed)))
        finally:
            self._context.metrics.prefill_runs.labels(end).inc()

    def _gone(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        if not self._open:
            self._idle.set()
        self._changed()

    async def idle(self) -> None:
        """Wait until no run is open."""
        await self._idle.wait()

    def close_all(self) -> None:
        """End every open run, as if draining: the callers see their lease lost."""
        for run in self._open.values():
            run.closing.set()

    def findings(self) -> list[str]:
        """Open runs, in words."""
        return [f"prefill run {run.name} is open" for run in self._open.values()]

    def _changed(self) -> None:
        self._context.metrics.leases.set(len(self._open))
        self._watchers.changed()

    async def _run(self, message: pb.RunRequest, run: _Run) -> None:
        """Ends by BatonError, or cancelled when the caller closes."""
        ours = self._context
        if self.refusing:
            raise BatonError(Reason.DRAINING, f"{ours.id} is draining")
        ours.check_moving(Reason.PREFILL_UNAVAILABLE)
        ours.check_card(message.card)
        if message.fingerprint != ours.fingerprint:
            raise BatonError(
                Reason.KV_LAYOUT_MISMATCH, f"layout {message.fingerprint} does not pair with {ours.fingerprint}"
            )
        ours.check_length(message.attempt)
        ours.check_grammar(message.attempt)
        request = request_from_pb(message.attempt)
        reservation: Reservation | None = None
        try:
            async with asyncio.timeout(min(RESERVE_S, remaining_s(request.deadline))):
                reservation = await ours.engine.reserve(request, decode_room=False)
            self._watchers.admitted(request.uid)
            accepted = pb.Accepted(cached_tokens=reservation.hit_tokens, peer=ours.peer)
            await run.write(pb.RunEvent(accepted=accepted))
            async with asyncio.timeout(remaining_s(request.deadline)):
                stored = await self._load(reservation, message, run)
                await self._prefill(reservation, -(-message.have_prefix // ours.spec.block_size), stored, run)
                if not request.batch:  # nobody comes back to it
                    self._offer(request, message.attempt.tenant)
                await run.closing.wait()  # the lease
            raise BatonError(Reason.DRAINING, f"{ours.id} is draining: the lease ends")
        except TimeoutError:
            if reservation is None:
                raise BatonError(Reason.NO_CAPACITY, "the engine did not answer in time") from None
            raise BatonError(Reason.DEADLINE_EXCEEDED, "the deadline passed while the KV was held") from None
        finally:
            if reservation is not None:
                await ours.release(reservation)

    async def _load(self, reservation: Reservation, message: pb.RunRequest, run: _Run) -> pb.StoreLoad | None:
        """What the plan's store has of the prompt, with signs of life meanwhile. Cut short when the run is to close."""
        source = Source(message.store, message.stored_tokens, message.store_tier, message.attempt.tenant)
        if not source:
            return None
        loading = asyncio.create_task(self._loader.load(reservation, source), name="store load")
        closing = asyncio.create_task(run.closing.wait(), name="run closing")
        try:
            while not loading.done() and not closing.done():
                await asyncio.wait((loading, closing), timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if not loading.done() and not self._context.stuck():
                    await run.write(pb.RunEvent(blocks=pb.Blocks()))
            return loading.result() if loading.done() else None
        finally:
            for task in (loading, closing):
                task.cancel()
            await asyncio.gather(loading, closing, return_exceptions=True)

    def _offer(self, request: Request, tenant: str) -> None:
        """The prompt's full blocks are sealed: a store may have them."""
        prompt = [*request.prompt_ids, *request.emitted_ids]
        self._offers.offer(block_keys(request.key_root, prompt, self._context.spec.block_size), tenant)

    async def _prefill(
        self, reservation: Reservation, have_blocks: int, stored: pb.StoreLoad | None, run: _Run
    ) -> None:
        """Announce until the prompt is computed, or until the run is to close."""
        events = cast("AsyncGenerator[PrefillEvent, None]", self._context.engine.prefill(reservation))
        closing = asyncio.create_task(run.closing.wait(), name="run closing")
        step: asyncio.Task[PrefillEvent] | None = None
        try:
            while not run.closing.is_set():
                step = step or asyncio.create_task(anext(events), name="prefill step")
                await asyncio.wait((step, closing), timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if step.done():
                    event, step = step.result(), None
                    await run.write(_to_pb(event, have_blocks, stored))
                    if isinstance(event, PrefillDone):
                        return
                elif not self._context.stuck():
                    await run.write(pb.RunEvent(blocks=pb.Blocks()))
        finally:
            closing.cancel()
            if step is not None:
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
            await events.aclose()


def _to_pb(event: PrefillEvent, have_blocks: int, stored: pb.StoreLoad | None = None) -> pb.RunEvent:
    if isinstance(event, SealedBlocks):
        skip = max(0, min(have_blocks - event.first_block, len(event.handles)))
        blocks = pb.Blocks(first_block=event.first_block + skip)
        blocks.handles.extend(handle_to_pb(h) for h in event.handles[skip:])
        return pb.RunEvent(blocks=blocks)
    return pb.RunEvent(
        done=pb.Done(
            first=[first_token_to_pb(t) for t in event.first],
            cached_tokens=event.cached_tokens,
            prompt_logprobs=[logprob_to_pb(lp) if lp else pb.Logprob() for lp in event.prompt_logprobs],
            stored=stored,
        )
    )
