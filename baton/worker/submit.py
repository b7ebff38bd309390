"""From Submit to the last event: one task owns an attempt and frees, on every way out, what it took."""

from __future__ import annotations

import asyncio
import time

import structlog

from baton.engine.port import Reservation
from baton.errors import BatonError, Reason
from baton.rpc.codec import request_from_pb
from baton.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempt, Attempts, Stage
from baton.worker.context import RESERVE_S, WorkerContext, remaining_s
from baton.worker.conversations import Conversations
from baton.worker.fallback import HandedBack, run_disaggregated
from baton.worker.load import StoreLoader
from baton.worker.local import run_local
from baton.worker.sessions import Sessions
from baton.worker.watch import Watchers

_log = structlog.get_logger()


class Submissions:
    """Takes attempts in and runs them."""

    def __init__(
        self,
        context: WorkerContext,
        sessions: Sessions,
        attempts: Attempts,
        watchers: Watchers,
        loader: StoreLoader,
        conversations: Conversations,
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._attempts = attempts
        self._watchers = watchers
        self._loader = loader
        self._conversations = conversations

    async def submit(self, message: pb.SubmitRequest) -> None:
        """Validate, reserve, and leave the attempt running. Raises BatonError, with nothing left behind, when refused.

        Cancelling it while it waits for the engine's answer aborts the attempt.
        """
        try:
            attempt = self._validated(message)
            self._attempts.add(attempt)
            admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            attempt.task = self._context.background.spawn(
                self._run(attempt, admitted), f"attempt {attempt.key[0]}/{attempt.key[1]}"
            )
            # A task that is cancelled before its first step never runs its own clean-up.
            attempt.task.add_done_callback(lambda _: self._gone(attempt, admitted))
            try:
                await asyncio.shield(admitted)
            except asyncio.CancelledError:
                attempt.abort()
                raise
        except BatonError as refused:
            self._context.metrics.refused.labels(refused.reason.name).inc()
            raise

    def _gone(self, attempt: Attempt, admitted: asyncio.Future[None]) -> None:
        self._attempts.remove(attempt)
        if not admitted.done():
            admitted.set_exception(BatonError(Reason.ABORTED, "aborted before it was admitted"))
            admitted.exception()  # the caller may have gone: seen here

    def _validated(self, message: pb.SubmitRequest) -> Attempt:
        context = self._context
        context.check_serving()
        context.check_moving(Reason.DECODE_UNAVAILABLE)
        session = self._sessions.get(message.session)
        context.check_card(message.card)
        context.check_model(message.attempt.model)
        plan = message.plan
        # First of all: another process may have come to the address that the plan means.
        if plan.worker.id and plan.worker.id != context.id:
            raise BatonError(Reason.DECODE_UNAVAILABLE, f"{plan.worker.id} is not here any more: this is {context.id}")
        if plan.worker.epoch and plan.worker.epoch != context.epoch:
            raise BatonError(Reason.DECODE_UNAVAILABLE, f"{context.id} has restarted since the plan was made")
        if plan.mode not in context.modes:
            mode = pb.Mode.Name(plan.mode) if plan.mode in pb.Mode.values() else str(plan.mode)
            raise BatonError(Reason.INVALID_REQUEST, f"{context.id} does not run {mode} attempts", param="plan")
        if plan.mode == pb.MODE_DISAGGREGATED and not plan.prefill.address:
            raise BatonError(Reason.INVALID_REQUEST, "a disaggregated plan names no prefill", param="plan")
        if plan.mode == pb.MODE_DISAGGREGATED and message.attempt.sampling.HasField("prompt_logprobs"):
            raise BatonError(Reason.INVALID_REQUEST, "prompt logprobs run merged", param="prompt_logprobs")
        context.check_length(message.attempt)
        context.check_grammar(message.attempt)
        request = request_from_pb(message.attempt)
        remaining_s(request.deadline)
        if request.batch:
            self._check_idle()
        strict = message.fallback == pb.FALLBACK_STRICT
        return Attempt(request, session, plan, strict, context.id, context.metrics, message.attempt.tenant)

    def _check_idle(self) -> None:
        """Raises BatonError NO_CAPACITY while an engine that does not know the batch lane has other work."""
        stats = self._context.engine.stats()
        if not self._context.spec.yields and stats.running + stats.waiting > self._attempts.batch:
            raise BatonError(Reason.NO_CAPACITY, f"{self._context.id} has other work than the batch lane's")

    async def _run(self, attempt: Attempt, admitted: asyncio.Future[None]) -> None:
        log = _log.bind(uid=attempt.request.uid, attempt=attempt.request.attempt)
        try:
            async with asyncio.timeout(remaining_s(attempt.request.deadline)):
                reservation = attempt.reservation = await self._reserve(attempt)
                admitted.set_result(None)
                self._watchers.admitted(attempt.request.uid)
                self._context.metrics.attempts.labels(pb.Mode.Name(attempt.plan.mode)).inc()
                await self._generate(attempt, reservation)
                await attempt.finished()
        except HandedBack as back:
            log.info("handed back", reason=back.reason.name, verified_tokens=back.verified_tokens)
            self._context.metrics.handbacks.labels(back.reason.name).inc()
            attempt.send_handback(back.reason, back.verified_tokens)
        except (BatonError, TimeoutError) as error:
            failure = (
                error
                if isinstance(error, BatonError)
                else BatonError(Reason.DEADLINE_EXCEEDED, f"the request's deadline passed while {attempt.stage}")
            )
            if admitted.done():
                log.info("attempt failed", reason=failure.reason.name, message=failure.message, stage=attempt.stage)
                attempt.send_failure(failure)
            else:
                admitted.set_exception(failure)
        except Exception as error:
            log.exception("attempt failed unexpectedly", stage=attempt.stage)
            failure = BatonError(Reason.INTERNAL, f"{type(error).__name__} in {self._context.id}: see its log")
            if admitted.done():
                attempt.send_failure(failure)
            else:
                admitted.set_exception(failure)
        finally:
            self._conversations.ended(attempt)
            if attempt.reservation is not None:
                await self._context.release(attempt.reservation)

    async def _reserve(self, attempt: Attempt) -> Reservation:
        try:
            async with asyncio.timeout(RESERVE_S):
                return await self._context.engine.reserve(attempt.request)
        except TimeoutError:
            if attempt.request.deadline <= time.time():
                raise
            raise BatonError(Reason.NO_CAPACITY, f"the engine did not answer in {RESERVE_S:g} s") from None

    async def _generate(self, attempt: Attempt, reservation: Reservation) -> None:
        if attempt.plan.mode == pb.MODE_DISAGGREGATED:
            await run_disaggregated(self._context, attempt, reservation, self._loader)
        else:
            await run_local(self._context, attempt, reservation, self._loader)
        attempt.stage = Stage.DECODING
