"""What a decode worker does when the hand-over fails.

    failure -> the alternate prefill, once, keeping the verified prefix
            -> compute the rest here, if the plan says that is cheapest
            -> give the request back: the frontend routes it again, merged included

A request at fault (too long, past its deadline) fails at once, and `strict` answers an error instead of running
elsewhere than planned. Once a first token has reached the client the alternate is no longer tried: it would draw
another first token. Giving back is then a resume; with several choices the rest is computed here, for a resume is for
one choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import structlog

from baton.engine.port import Reservation
from baton.errors import BatonError, Reason
from baton.route import RouteReason
from baton.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempt
from baton.worker.context import WorkerContext
from baton.worker.handover import Handover
from baton.worker.load import StoreLoader
from baton.worker.local import run_local

_log = structlog.get_logger()

_REQUEST_AT_FAULT = frozenset(
    {
        Reason.INVALID_REQUEST,
        Reason.CONTEXT_LENGTH_EXCEEDED,
        Reason.REQUEST_TOO_LARGE,
        Reason.MODEL_NOT_FOUND,
        Reason.DEADLINE_EXCEEDED,
    }
)
_ROUTE_REASON = {
    Reason.PREFILL_UNAVAILABLE: RouteReason.PREFILL_UNAVAILABLE,
    Reason.NO_CAPACITY: RouteReason.PREFILL_NO_CAPACITY,
    Reason.VERSION_MISMATCH: RouteReason.PREFILL_UNAVAILABLE,
    Reason.KV_LAYOUT_MISMATCH: RouteReason.KV_LAYOUT_MISMATCH,
    Reason.KV_TRANSFER_TIMEOUT: RouteReason.KV_TRANSFER_TIMEOUT,
    Reason.KV_TRANSFER_FAILED: RouteReason.KV_TRANSFER_FAILED,
    Reason.KV_BAD_HANDLE: RouteReason.KV_TRANSFER_FAILED,
    Reason.KV_CHECKSUM_MISMATCH: RouteReason.KV_CHECKSUM_MISMATCH,
    Reason.KV_STALE_EPOCH: RouteReason.KV_STALE_EPOCH,
    Reason.KV_LEASE_LOST: RouteReason.KV_LEASE_LOST,
}


class HandedBack(Exception):
    """The request goes back to be routed again; `verified_tokens` of its prompt are in this worker's cache."""

    def __init__(self, reason: Reason, verified_tokens: int) -> None:
        super().__init__(reason.name)
        self.reason = reason
        self.verified_tokens = verified_tokens


class Step(Enum):
    """What to do after a failed hand-over."""

    FAIL = auto()
    ALTERNATE = auto()
    LOCAL = auto()
    HAND_BACK = auto()


@dataclass(frozen=True)
class Situation:
    """All that the policy looks at. `emitted`: the client has a first token of this attempt."""

    strict: bool
    emitted: bool
    alternate_left: bool
    local_is_cheapest: bool
    choices: int = 1


def next_step(failed: Reason, now: Situation) -> Step:
    """The policy. Pure."""
    if now.strict or failed in _REQUEST_AT_FAULT:
        return Step.FAIL
    if now.alternate_left and not now.emitted:
        return Step.ALTERNATE
    if now.local_is_cheapest or (now.emitted and now.choices > 1):
        return Step.LOCAL
    return Step.HAND_BACK


def route_reason(failed: Reason) -> RouteReason:
    """The name under which a failed hand-over is told and counted."""
    return _ROUTE_REASON.get(failed, RouteReason.PREFILL_FAILED)


async def run_disaggregated(
    context: WorkerContext, attempt: Attempt, reservation: Reservation, loader: StoreLoader
) -> None:
    """Get the prompt's KV from the plan's prefill, or do what the policy says instead, and start generating.

    Raises BatonError (strict, or the request's own fault) and HandedBack.
    """
    plan = attempt.plan
    targets = [plan.prefill] + ([plan.alternate] if plan.alternate.address else [])
    while True:
        handover = Handover(context, attempt, reservation, targets.pop(0))
        try:
            first = await handover.run()
        except BatonError as error:
            step = next_step(
                error.reason,
                Situation(
                    strict=attempt.strict,
                    emitted=attempt.emitted,
                    alternate_left=bool(targets),
                    local_is_cheapest=plan.local_is_cheapest,
                    choices=len(attempt.request.choices),
                ),
            )
            _failed(context, attempt, handover.target, error, step)
            if step is Step.FAIL:
                raise
            if step is Step.ALTERNATE:
                continue
            if step is Step.HAND_BACK:
                raise HandedBack(error.reason, reservation.cached_tokens) from error
            attempt.route.mode = pb.MODE_LOCAL
            return await run_local(context, attempt, reservation, loader, handover.first)
        context.metrics.handovers.labels("ok").inc()
        if attempt.open:
            await context.engine.generate(reservation, first)
        return None


_TOLD = {
    Step.ALTERNATE: RouteReason.ALTERNATE_PREFILL,
    Step.LOCAL: RouteReason.LOCAL_FALLBACK,
    Step.HAND_BACK: RouteReason.HANDBACK,
}


def _failed(context: WorkerContext, attempt: Attempt, target: pb.Target, error: BatonError, step: Step) -> None:
    """Tell it: in the route, in the counters and in the log. A fallback is never silent."""
    reasons = [route_reason(error.reason)] + ([_TOLD[step]] if step in _TOLD else [])
    attempt.route.reasons.extend(reasons)
    for reason in reasons:
        context.metrics.fallbacks.labels(reason).inc()
    context.metrics.handovers.labels(error.reason.name).inc()
    _log.warning(
        "hand-over failed",
        uid=attempt.request.uid,
        attempt=attempt.request.attempt,
        prefill=target.id,
        reason=error.reason.name,
        message=error.message,
        then=step.name.lower(),
    )
