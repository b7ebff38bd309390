"""Merged and local: the worker that streams computes the prompt itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

from baton.engine.port import FirstToken, PrefillDone, PrefillEvent, Reservation
from baton.worker.attempts import Attempt, Stage
from baton.worker.context import WorkerContext
from baton.worker.load import Source, StoreLoader


async def run_local(
    context: WorkerContext,
    attempt: Attempt,
    reservation: Reservation,
    loader: StoreLoader,
    first: Sequence[FirstToken] = (),
) -> None:
    """Start generating: what the verified prefix, and the plan's store, leave of the prompt is computed here.

    `first`: tokens the client has already got from this attempt. Events then come by `Attempts.dispatch`.
    """
    attempt.stage = Stage.PREFILLING
    attempt.route.cached_tokens = attempt.route.cached_tokens or reservation.hit_tokens
    plan = attempt.plan
    stored = await loader.load(reservation, Source(plan.store, plan.stored_tokens, plan.store_tier, attempt.tenant))
    if stored is not None:
        attempt.note_store(stored)
    attempt.route.computed_tokens = attempt.tokens - min(reservation.cached_tokens, attempt.tokens)
    if attempt.request.sampling.prompt_logprobs is not None and not first:
        first = await _prefill_with_logprobs(context, attempt, reservation)
        if not attempt.open:
            return
    await context.engine.generate(reservation, first)


async def _prefill_with_logprobs(
    context: WorkerContext, attempt: Attempt, reservation: Reservation
) -> Sequence[FirstToken]:
    """Compute the prompt as a prefill worker does: that is where an engine tells the prompt's logprobs."""
    events = cast("AsyncGenerator[PrefillEvent, None]", context.engine.prefill(reservation))
    async with aclosing(events):
        async for event in events:
            if isinstance(event, PrefillDone):
                attempt.send_first(event.first, event.prompt_logprobs)
                return event.first
    return ()
