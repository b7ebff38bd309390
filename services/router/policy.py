"""The routing policy: pure functions from what is known of the workers to the cheapest plan.

A candidate is a (prefill, decode) pair, a merged worker, or a decode worker that computes the prompt itself. Its cost
is a sum of terms in seconds (costs.py); the lowest wins. README.md beside this file is the whole of it in words.
Nothing here reads a clock, a socket or a global, so a simulator can drive the same code.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import attrgetter

from baton.errors import Reason
from baton.route import RouteReason
from services.router.costs import (
    MERGED,
    PREFILL,
    Ask,
    Parameters,
    Terms,
    TransferRate,
    WorkerState,
    no_loads,
    own_cost,
    pair_cost,
    pair_pass_s,
    prefill_side,
    worthwhile_loads,
)
from services.router.stored import Load, LoadTime


class Mode(StrEnum):
    """How a candidate would run the request."""

    DISAGGREGATED = "disaggregated"
    MERGED = "merged"
    LOCAL = "local"


PAIR, WHOLE, LOCAL = Mode
"""Names of their own, as the roles' (costs.py): by a disaggregated pair, by a merged worker, by a decode worker."""
LACKS = "LACKS"
"""Begins the reason why an engine that cannot do what a request asks for is left out."""
MOST_PAIRS = 4096
"""A pair costs some microseconds, in which the router answers nobody else."""
_PREFERENCE = {PAIR: 0, WHOLE: 1, LOCAL: 2}
"""Which of two equally cheap candidates: the one that freezes nobody first."""
_total = attrgetter("total")


@dataclass(slots=True)
class Candidate:
    """One way to run the request; never changed once made.

    `total` is that of `terms`, the cost; `excluded` is why it may not be taken, or empty. `load`
    is what it takes from a store.
    """

    mode: Mode
    worker: WorkerState
    prefill: WorkerState | None
    ask: Ask
    terms: Terms
    total: float
    excluded: str = ""
    load: Load | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that are there where it would be computed."""
        return self.ask.cached(self.prefill or self.worker)

    @property
    def ttft(self) -> float:
        """Predicted seconds to the first token: the terms that this request itself waits for."""
        return self.terms.ttft


@dataclass(slots=True)
class Choice:
    """The plan: the winner, one alternate prefill, and whether its decode should compute alone if the prefill fails.
    Never changed once made."""

    winner: Candidate
    alternate: WorkerState | None
    local_is_cheapest: bool
    reasons: tuple[RouteReason, ...]


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan."""

    reason: Reason
    message: str
    late: bool = False
    """For the limit of the first token alone: among more workers there may be one in time."""


def _barred(worker: WorkerState, ask: Ask) -> str:
    """Why `worker` may have no part in this request, or an empty string."""
    if ask.exclude and worker.id in ask.exclude:
        return f"EXCLUDED: {worker.id} by the request"
    if worker.unusable:
        return worker.unusable
    if ask.needs and not ask.needs.isdisjoint(worker.lacks):
        return f"{LACKS}: {worker.id} cannot do {', '.join(sorted(ask.needs & worker.lacks))}"
    if worker.max_context and ask.prompt_tokens >= worker.max_context:
        return f"{Reason.CONTEXT_LENGTH_EXCEEDED.name}: {worker.id} takes {worker.max_context} tokens"
    if worker.blocks_total and (needed := worker.blocks_for(ask.prompt_tokens)) > worker.blocks_free:
        return f"{Reason.NO_CAPACITY.name}: {worker.id} has {worker.blocks_free} of {needed} blocks"
    return ""


def candidates(
    workers: Iterable[WorkerState],
    ask: Ask,
    transfer_rate: TransferRate,
    parameters: Parameters,
    *,
    exhaustive: bool = False,
    load_time: LoadTime = no_loads,
) -> list[Candidate]:
    """Every way to run the request, costed; barred ones carry the reason in `excluded`. Each with the cheapest of what
    stores offer it, where that is cheaper than computing.

    Pairs grow with prefills x decodes, so not each is paired with each (_cross), and those that are barred only for the
    reason they carry. `exhaustive` pairs all, up to `MOST_PAIRS`; beyond that each worker is in one candidate at least.
    """
    prefills: list[WorkerState] = []
    barred_prefills: list[tuple[WorkerState, str]] = []
    decodes: list[tuple[WorkerState, str]] = []
    usable: dict[str, list[WorkerState]] = {}  # of the decode workers, by layout
    found: list[Candidate] = []
    picky = bool(ask.exclude or ask.needs)
    for worker in workers:
        why = _barred(worker, ask) if picky or ask.prompt_tokens > worker.longest else ""
        if worker.role is PREFILL:
            if why:
                barred_prefills.append((worker, why))
            else:
                prefills.append(worker)
            continue
        mode = WHOLE
        if worker.role is not MERGED:
            mode = LOCAL
            decodes.append((worker, why))
            if not why:
                usable.setdefault(worker.fingerprint, []).append(worker)
        terms, load = own_cost(worker, ask, parameters), None
        if ask.stored:
            loads = worthwhile_loads(worker, ask, load_time, parameters)
            terms, load = _with_load(terms, partial(own_cost, worker, ask, parameters), loads)
        found.append(Candidate(mode, worker, None, ask, terms, sum(terms), why, load))

    def pair(prefill: WorkerState, decode: WorkerState, why: str = "") -> Candidate:
        if not why and prefill.fingerprint != decode.fingerprint:
            why = f"{Reason.KV_LAYOUT_MISMATCH.name}: {prefill.fingerprint} != {decode.fingerprint}"
        terms, load = pair_cost(prefill, decode, ask, transfer_rate, parameters), None
        if ask.stored:
            loads = worthwhile_loads(prefill, ask, load_time, parameters, pair_pass_s(prefill, decode))
            terms, load = _with_load(terms, partial(pair_cost, prefill, decode, ask, transfer_rate, parameters), loads)
        return Candidate(PAIR, decode, prefill, ask, terms, sum(terms), why, load)

    if exhaustive and (len(prefills) + len(barred_prefills)) * len(decodes) <= MOST_PAIRS:
        everyone = [(p, "") for p in prefills] + barred_prefills
        return found + [pair(p, d, why_d or why_p) for d, why_d in decodes for p, why_p in everyone]
    if exhaustive and decodes:
        found += [pair(p, decodes[0][0], why) for p, why in barred_prefills]
    for layout in sorted(usable):
        of_layout = usable[layout]
        fitting = [p for p in prefills if p.fingerprint == layout]
        if fitting:
            found += _cross(fitting, of_layout, ask, parameters, pair)
            continue
        unfit = [(p, "") for p in prefills] + barred_prefills
        found += [pair(p, d, why) for d in of_layout for p, why in unfit]
    return found


def _cross(
    prefills: list[WorkerState],
    decodes: list[WorkerState],
    ask: Ask,
    parameters: Parameters,
    pair: Callable[[WorkerState, WorkerState], Candidate],
) -> list[Candidate]:
    """Pairs of one layout: the prefill with the cheapest side with every decode worker, then the best decode of these
    with the other prefills. The sides of a pair meet only in the transfer and in queues that pass at the same time."""
    if len(decodes) == 1:
        return [pair(prefill, decodes[0]) for prefill in prefills]
    sides = [prefill_side(prefill, ask) for prefill in prefills]
    least = min(sides)
    first = prefills[sides.index(least)]
    if sides.count(least) > 1:
        equal = [prefill for prefill, side in zip(prefills, sides, strict=True) if side == least]
        first = min(equal, key=lambda p: _spread(ask.uid, p.id))
    found = [pair(first, decode) for decode in decodes]
    best = _best(found, ask, parameters)
    return found + [pair(prefill, best.worker) for prefill in prefills if best and prefill is not first]


def _with_load(without: Terms, cost: Callable[[Load], Terms], options: Sequence[Load]) -> tuple[Terms, Load | None]:
    """The terms without a load, or with the one that makes the sum the smallest."""
    best, chosen = without, None
    for load in options:
        terms = cost(load)
        if terms.total < best.total:
            best, chosen = terms, load
    return best, chosen


def _spread(*parts: str) -> int:
    """The same for the same request, different from one request to the next."""
    return zlib.crc32("|".join(parts).encode())


def _best(options: Sequence[Candidate], ask: Ask, parameters: Parameters) -> Candidate | None:
    """The cheapest; among those within `tie_s` of it the preferred mode, then the fewest streams, then a hash of the
    uid: the same for the same request, spread over requests."""
    if len(options) < 2:
        return options[0] if options else None
    limit = min(options, key=_total).total + parameters.tie_s
    tied = [option for option in options if option.total <= limit]
    if len(tied) == 1:
        return tied[0]
    return min(
        tied,
        key=lambda c: (
            _PREFERENCE[c.mode],
            c.worker.streams,
            _spread(ask.uid, c.worker.id, c.prefill.id if c.prefill else ""),
        ),
    )


def choose(found: Sequence[Candidate], ask: Ask, parameters: Parameters) -> Choice | Refusal:
    """The plan for `ask` among its candidates, or why there is none."""
    allowed = possible = [c for c in found if not c.excluded]
    if ask.strict or ask.merged_only:
        allowed = [c for c in allowed if _fits(c.mode, ask)]
    if ask.merged_only and any(c.mode is WHOLE for c in allowed):
        allowed = [c for c in allowed if c.mode is WHOLE]
    in_time = [c for c in allowed if c.ttft <= ask.ttft_slo_s] if ask.ttft_slo_s else allowed
    winner = _best(in_time, ask, parameters)
    if winner is None:
        if not allowed:
            return _refusal(found, ask)
        soonest = min(c.ttft for c in allowed)
        late = f"first token in {soonest:.2f} s at the soonest, {ask.ttft_slo_s:.2f} s asked"
        return Refusal(Reason.NO_CAPACITY, late, late=True)
    return Choice(
        winner,
        _alternate(allowed, winner, ask, parameters),
        _local_is_cheapest(possible, winner),
        _why(found, winner, ask),
    )


def _fits(mode: Mode, ask: Ask) -> bool:
    if ask.merged_only:
        return mode is WHOLE or (mode is LOCAL and not ask.strict)
    return mode is PAIR or not ask.strict


def _alternate(allowed: Sequence[Candidate], winner: Candidate, ask: Ask, parameters: Parameters) -> WorkerState | None:
    """The second-best prefill for the same decode worker."""
    first, decode = winner.prefill, winner.worker
    if first is None:
        return None
    others = [c for c in allowed if c.worker is decode and c.mode is PAIR and c.prefill is not first]
    second = _best(others, ask, parameters)
    return second.prefill if second else None


def _local_is_cheapest(possible: Sequence[Candidate], winner: Candidate) -> bool:
    """Whether, without the prefill, the decode worker computing alone costs less than any merged worker."""
    local = merged = math.inf
    for item in possible:
        if item.mode is WHOLE:
            merged = min(merged, item.total)
        elif item.mode is LOCAL and item.worker is winner.worker:
            local = item.total
    return local < merged


def _why(found: Sequence[Candidate], winner: Candidate, ask: Ask) -> tuple[RouteReason, ...]:
    if winner.mode is PAIR:
        return (RouteReason.DISAGGREGATED,)
    local = winner.mode is LOCAL
    if ask.merged_only:
        return (RouteReason.MERGED_ONLY, RouteReason.LOCAL_FALLBACK) if local else (RouteReason.MERGED_ONLY,)
    if any(c.mode is PAIR and not c.excluded for c in found):
        return (RouteReason.LOCAL_CHEAPEST if local else RouteReason.MERGED_CHEAPEST,)
    if not any(c.mode is LOCAL and not c.excluded for c in found):
        return (RouteReason.NO_DECODE, RouteReason.MERGED_FALLBACK)
    without = RouteReason.KV_LAYOUT_MISMATCH if _only_layouts_differ(found) else RouteReason.PREFILL_UNAVAILABLE
    return (without, RouteReason.LOCAL_FALLBACK if local else RouteReason.MERGED_FALLBACK)


def _only_layouts_differ(found: Sequence[Candidate]) -> bool:
    """Whether there are pairs, and all that is wrong with those of usable decode workers is that their KV differs."""
    usable = {c.worker.id for c in found if c.mode is LOCAL and not c.excluded}
    pairs = [c.excluded for c in found if c.mode is PAIR and c.worker.id in usable]
    return bool(pairs) and all(why.startswith(Reason.KV_LAYOUT_MISMATCH.name) for why in pairs)


def _refusal(found: Sequence[Candidate], ask: Ask) -> Refusal:
    """The reason that helps the caller most: what all share, else capacity before absence."""
    streams = [c for c in found if c.mode is not PAIR]
    if ask.strict and not ask.merged_only:
        streams = [c for c in streams if c.mode is LOCAL]
        if any(not c.excluded for c in streams):
            pairs = [c.excluded for c in found if c.mode is PAIR and c.excluded]
            return _from_exclusions(pairs, Reason.PREFILL_UNAVAILABLE, "no prefill worker can serve this request")
    if ask.merged_only and ask.strict:
        streams = [c for c in streams if c.mode is WHOLE]
    return _from_exclusions(
        [c.excluded for c in streams], Reason.DECODE_UNAVAILABLE, "no decode or merged worker can serve this request"
    )


def _from_exclusions(why: Sequence[str], otherwise: Reason, message: str) -> Refusal:
    names = {text.partition(":")[0] for text in why}
    detail = f"{message}: {'; '.join(sorted(set(why))[:4])}" if why else message
    if names == {LACKS}:
        return Refusal(Reason.INVALID_REQUEST, detail)
    if Reason.NO_CAPACITY.name in names:
        return Refusal(Reason.NO_CAPACITY, detail)
    for shared in (Reason.CONTEXT_LENGTH_EXCEEDED, Reason.VERSION_MISMATCH, Reason.DRAINING):
        if names == {shared.name}:
            return Refusal(shared, detail)
    return Refusal(otherwise, detail)
