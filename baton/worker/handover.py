"""The decode side of a hand-over: one try against one prefill worker.

`Prefill.Run` is open for as long as KV is read from there: it is the lease. It is closed on every way out, and when it
ends by itself, reads that are still under way are cancelled: what arrives after the lease is discarded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import grpc

from baton.engine.port import FinishReason, FirstToken, Reservation
from baton.errors import BatonError, Reason
from baton.kv.handle import Handle
from baton.rpc.codec import first_token_from_pb, handle_from_pb, peer_from_pb, request_to_pb
from baton.rpc.errors import from_failure, from_rpc
from baton.rpc.patience import Patience
from baton.transfer.port import ReadReport
from baton.v1 import kv_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempt, Stage
from baton.worker.context import WorkerContext, remaining_s

CONNECT_S = 1.0
SILENCE_S = 1.5
"""How long a Run may say nothing before Done: a prefill whose engine moves says so two times a second."""
ACCEPT_RESUMED_S = 0.5
"""How long a prefill may take to accept a resumed output, whose client stands still: one that lives does so at once."""
PAIR_S = 5.0
READ_BASE_S = 2.0
READ_BYTES_S = 50e6
"""A read's deadline is READ_BASE_S and its bytes at this rate: far below any path worth using."""


class Handover:
    """One try. `first` holds the first tokens once they are known (they are sent to the client at once)."""

    def __init__(self, context: WorkerContext, attempt: Attempt, reservation: Reservation, target: pb.Target) -> None:
        self.target = target
        self.first: Sequence[FirstToken] = ()
        self._context = context
        self._attempt = attempt
        self._reservation = reservation
        self._blocks: asyncio.Queue[tuple[int, list[Handle]] | None] = asyncio.Queue()  # bounded by the prompt
        self._accepted = False

    async def run(self) -> Sequence[FirstToken]:
        """Load the prompt's KV; the first token of every choice, already sent. Raises BatonError with what went wrong.

        Whatever it raises, the reservation keeps the prefix that was verified.
        """
        self._attempt.stage = Stage.PREFILLING
        self._attempt.route.prefill = self.target.id
        await self._connect()
        channel = self._context.channels.get(self.target.address)
        stub: worker_pb2_grpc.PrefillServiceAsyncStub = worker_pb2_grpc.PrefillServiceStub(channel)
        call = stub.Run(self._run_request(), timeout=remaining_s(self._attempt.request.deadline))
        try:
            return await self._transfer(call, await self._accept(call))
        except grpc.aio.AioRpcError as error:
            lost = Reason.KV_LEASE_LOST if self._accepted else Reason.PREFILL_UNAVAILABLE
            raise from_rpc(error, lost) from error
        finally:
            call.cancel()

    def _run_request(self) -> pb.RunRequest:
        plan = self._attempt.plan
        return pb.RunRequest(
            attempt=request_to_pb(self._attempt.request, tenant=self._attempt.tenant),
            have_prefix=self._reservation.cached_tokens,
            fingerprint=self._context.fingerprint,
            peer=self._context.peer,
            card=self._context.card,
            store=plan.store,
            stored_tokens=plan.stored_tokens,
            store_tier=plan.store_tier,
        )

    async def _connect(self) -> None:
        try:
            async with Patience(CONNECT_S):
                await self._context.channels.connected(self.target.address)
        except TimeoutError:
            raise BatonError(
                Reason.PREFILL_UNAVAILABLE, f"no connection to {self.target.id} at {self.target.address}"
            ) from None

    async def _accept(self, call: grpc.aio.UnaryStreamCall[pb.RunRequest, pb.RunEvent]) -> kv_pb2.Peer:
        event = await self._next(call, ACCEPT_RESUMED_S if self._attempt.request.emitted_ids else SILENCE_S)
        if not event.HasField("accepted"):
            raise BatonError(Reason.PREFILL_UNAVAILABLE, f"{self.target.id} did not begin with Accepted")
        self._accepted = True
        self._attempt.route.cached_tokens = event.accepted.cached_tokens
        return event.accepted.peer

    async def _pair(self, peer: kv_pb2.Peer) -> None:
        choice = await self._context.transports.pair(peer_from_pb(peer), time.monotonic() + PAIR_S)
        self._attempt.route.transport = choice.transport

    async def _transfer(
        self, call: grpc.aio.UnaryStreamCall[pb.RunRequest, pb.RunEvent], peer: kv_pb2.Peer
    ) -> Sequence[FirstToken]:
        """Receive and load side by side. Loading ends the transfer; so does a first token that ends every choice, or
        a run that falls silent: pairing with a process that has stopped would take until its own deadline."""
        receive = asyncio.create_task(self._receive(call), name="handover receive")
        load = asyncio.create_task(self._load(peer), name="handover load")
        try:
            await asyncio.wait((receive, load), return_when=asyncio.FIRST_COMPLETED)
            await (load if load.done() else receive)
            return self.first
        finally:
            receive.cancel()
            load.cancel()
            await asyncio.gather(receive, load, return_exceptions=True)

    async def _receive(self, call: grpc.aio.UnaryStreamCall[pb.RunRequest, pb.RunEvent]) -> None:
        """Queue what is announced. Returns only when nothing is left to generate; the stream's end raises."""
        while True:
            event = await self._next(call, None if self.first else SILENCE_S)
            if event.HasField("blocks"):
                if event.blocks.handles:  # none: a sign of life
                    handles = [handle_from_pb(h) for h in event.blocks.handles]
                    self._blocks.put_nowait((event.blocks.first_block, handles))
            elif event.HasField("done"):
                self.first = self._first_tokens(event.done)
                self._attempt.route.cached_tokens = event.done.cached_tokens
                if event.done.HasField("stored"):
                    self._attempt.note_store(event.done.stored)
                self._attempt.send_first(self.first)
                self._blocks.put_nowait(None)
                if not self._attempt.open:
                    return

    def _first_tokens(self, done: pb.Done) -> list[FirstToken]:
        """Checked before anything of them leaves: what has reached the client cannot be taken back."""
        request, vocabulary = self._attempt.request, self._context.spec.vocab_size
        try:
            first = [first_token_from_pb(t) for t in done.first]
        except ValueError:  # it ended in a way that we do not know
            first = []
        told = sorted(token.choice for token in first)
        if self.first or told != sorted(request.choices) or any(token.token_id >= vocabulary for token in first):
            raise BatonError(Reason.PREFILL_UNAVAILABLE, f"{self.target.id} told first tokens that cannot be")
        if self._attempt.tokens + 1 < self._context.spec.max_context:
            return first
        return [token if token.finish else replace(token, finish=FinishReason.LENGTH) for token in first]

    async def _next(
        self, call: grpc.aio.UnaryStreamCall[pb.RunRequest, pb.RunEvent], silence_s: float | None
    ) -> pb.RunEvent:
        try:
            if silence_s is None:
                event = await call.read()
            else:
                async with Patience(silence_s):
                    event = await call.read()
        except TimeoutError:
            raise BatonError(Reason.PREFILL_UNAVAILABLE, f"{self.target.id} said nothing for {silence_s:g} s") from None
        if not isinstance(event, pb.RunEvent):
            raise BatonError(Reason.KV_LEASE_LOST, f"{self.target.id} ended the run")
        if event.HasField("failure"):
            failed = from_failure(event.failure)
            if failed.reason is Reason.DRAINING:  # of this attempt, DRAINING says that we are
                failed = BatonError(Reason.PREFILL_UNAVAILABLE, failed.message)
            raise failed
        return event

    async def _load(self, peer: kv_pb2.Peer) -> None:
        """Load what is announced, in prompt order, until the whole prompt is here and the first tokens are known."""
        await self._pair(peer)
        ended = False
        whole = self._context.spec.handed_over(self._attempt.tokens)
        while not ended or self._reservation.cached_tokens < whole:
            announced = None if ended else await self._blocks.get()
            if announced is None:
                if ended:
                    raise BatonError(Reason.KV_LEASE_LOST, f"{self.target.id} announced only a part of the prompt")
                ended = True
                continue
            first_block, handles = announced
            while not self._blocks.empty():  # one batch of what has come meanwhile
                more = self._blocks.get_nowait()
                if more is None:
                    ended = True
                    break
                if more[0] != first_block + len(handles):
                    raise BatonError(Reason.KV_BAD_HANDLE, f"{self.target.id} announced blocks out of order")
                handles += more[1]
            await self._read(first_block, handles)

    async def _read(self, first_block: int, handles: list[Handle]) -> None:
        deadline = time.monotonic() + READ_BASE_S + sum(h.length for h in handles) / READ_BYTES_S
        before = self._reservation.cached_tokens
        report = await self._reservation.load(first_block, handles, self._context.reader, deadline)
        self._account(report, self._reservation.cached_tokens - before)
        for block in report.blocks:
            if block.reason is not None:
                raise BatonError(block.reason, f"reading KV from {self.target.id}")

    def _account(self, report: ReadReport, tokens: int) -> None:
        route, metrics = self._attempt.route, self._context.metrics
        route.kv_bytes += report.bytes
        route.kv_seconds += report.seconds
        route.loaded_tokens += tokens
        metrics.transfer_bytes.inc(report.bytes)
        metrics.transfer_seconds.inc(report.seconds)
        for block in report.blocks:
            if block.reason is not None:
                metrics.transfer_failures.labels(block.reason.name).inc()
