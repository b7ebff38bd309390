"""The routing policy: pure functions from what is known of the workers to the cheapest plan.

A candidate is a (prefill, decode) pair, a merged worker, or a decode worker that computes the prompt itself. Its cost
is a sum of terms in seconds; the lowest wins. The formula, its inputs, parameters and limits are in README.md beside
this file. Nothing here reads a clock, a socket or a global, so a simulator can drive the same code.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from baton.errors import Reason
from baton.route import RouteReason


class Role(StrEnum):
    """What a worker is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MERGED = "merged"


class Mode(StrEnum):
    """How a candidate would run the request."""

    DISAGGREGATED = "disaggregated"
    MERGED = "merged"
    LOCAL = "local"


_PREFERENCE = {Mode.DISAGGREGATED: 0, Mode.MERGED: 1, Mode.LOCAL: 2}
"""Which of two equally cheap candidates: the one that freezes nobody first."""


@dataclass(frozen=True)
class Parameters:
    """The policy's constants; README.md says where each comes from."""

    stall_weight: float = 1.0
    assumed_streams: float = 1.0
    handover_s: float = 0.005
    assumed_arrivals_s: float = 0.5
    shortlist: int = 8
    tie_s: float = 0.001


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker at this moment, with the reservations already added.

    `streams` counts running, waiting and reserved ones; `queued_tokens` are prompt tokens ahead of a new one;
    `prefill_share` is the share of recent time it spent computing prompts, 0 to 1. `unusable` is empty, or the reason
    (a `Reason` name, a colon, words) why it may not be taken at all.
    """

    id: str
    role: Role
    fingerprint: str
    block_size: int
    block_bytes: int
    max_context: int
    max_streams: int
    streams: int
    queued_tokens: float
    blocks_total: int
    blocks_free: int
    prefill_tok_s: float
    step_s: float
    prefill_share: float = 0.0
    unusable: str = ""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a prompt of `tokens` takes, with the one more that the first output needs."""
        return -(-tokens // self.block_size) + 1


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be routed. `output_tokens` is the expected length of the answer, `hits` are prefix-hit tokens by
    worker id."""

    uid: str
    prompt_tokens: int
    output_tokens: float
    hits: Mapping[str, int] = field(default_factory=dict)
    exclude: frozenset[str] = frozenset()
    merged_only: bool = False
    strict: bool = False
    ttft_slo_s: float = 0.0

    def cached(self, worker: WorkerState) -> int:
        """Tokens of the prompt whose KV is on `worker`: whole blocks, never the last token (its logits are needed)."""
        most = (self.prompt_tokens - 1) // worker.block_size * worker.block_size
        return max(0, min(self.hits.get(worker.id, 0), most))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the request. `terms` are seconds by name; `excluded` is why it may not be taken, or empty."""

    mode: Mode
    worker: WorkerState
    prefill: WorkerState | None
    terms: Mapping[str, float]
    cached_tokens: int
    excluded: str = ""

    @property
    def total(self) -> float:
        """The cost, in seconds."""
        return sum(self.terms.values())

    @property
    def ttft(self) -> float:
        """Predicted seconds to the first token: the terms that this request itself waits for."""
        return sum(self.terms[name] for name in ("queue", "prefill", "transfer"))


@dataclass(frozen=True)
class Choice:
    """The plan: the winner, one alternate prefill, and whether its decode should compute alone if the prefill fails."""

    winner: Candidate
    alternate: WorkerState | None
    local_is_cheapest: bool
    reasons: tuple[RouteReason, ...]


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan."""

    reason: Reason
    message: str


TransferRate = Callable[[str, str], float]
"""(prefill id, decode id) -> bytes per second."""


def prefill_seconds(worker: WorkerState, tokens: float) -> float:
    """How long `worker` computes `tokens` of a prompt: at its rate, and never less than one forward pass."""
    return max(tokens / worker.prefill_tok_s, worker.step_s) if tokens > 0 else 0.0


def queue_seconds(worker: WorkerState, ask: Ask) -> float:
    """How long a new request waits before `worker` starts it: prompt tokens ahead, then a free stream.

    Streams leave one by one: with `max_streams` running for `output * step` seconds each, one ends every
    `output * step / max_streams` seconds.
    """
    tokens_ahead = worker.queued_tokens / worker.prefill_tok_s
    excess = worker.streams + 1 - worker.max_streams
    if worker.role is Role.PREFILL or excess <= 0:
        return tokens_ahead
    return tokens_ahead + excess * ask.output_tokens * worker.step_s / worker.max_streams


def _stream_terms(worker: WorkerState, ask: Ask, expected_share: float = 0.0) -> dict[str, float]:
    """What streaming from `worker` costs: a fuller batch steps slower, and the share of its time that later prompts
    will take (as measured, at least `expected_share`) is lost to this stream."""
    decode_s = ask.output_tokens * worker.step_s
    return {
        "batch": decode_s * worker.streams / worker.max_streams,
        "interference": decode_s * min(1.0, max(worker.prefill_share, expected_share)),
    }


def own_cost(worker: WorkerState, ask: Ask, parameters: Parameters) -> dict[str, float]:
    """Terms of a worker that computes the prompt and streams: merged, or local on a decode worker."""
    uncached = ask.prompt_tokens - ask.cached(worker)
    freeze_s = uncached / worker.prefill_tok_s
    frozen = worker.streams + parameters.assumed_streams
    return {
        "queue": queue_seconds(worker, ask),
        "prefill": prefill_seconds(worker, uncached),
        "transfer": 0.0,
        "stall": freeze_s * frozen * parameters.stall_weight,
        **_stream_terms(worker, ask, parameters.assumed_arrivals_s * freeze_s),
    }


def pair_cost(
    prefill: WorkerState, decode: WorkerState, ask: Ask, transfer_rate: TransferRate, parameters: Parameters
) -> dict[str, float]:
    """Terms of a hand-over. The decode worker's own queue passes while the prefill computes: the rest of it counts."""
    compute = prefill_seconds(prefill, ask.prompt_tokens - ask.cached(prefill))
    ahead = queue_seconds(prefill, ask)
    missing = -(-(ask.prompt_tokens - ask.cached(decode)) // decode.block_size) * decode.block_bytes
    return {
        "queue": ahead + max(0.0, queue_seconds(decode, ask) - ahead - compute),
        "prefill": compute,
        "transfer": parameters.handover_s + missing / transfer_rate(prefill.id, decode.id),
        "stall": 0.0,
        **_stream_terms(decode, ask),
    }


def _barred(worker: WorkerState, ask: Ask) -> str:
    """Why `worker` may have no part in this request, or an empty string."""
    if worker.id in ask.exclude:
        return f"EXCLUDED: {worker.id} by the request"
    if worker.unusable:
        return worker.unusable
    if ask.prompt_tokens + (worker.role is not Role.PREFILL) > worker.max_context:
        return f"{Reason.CONTEXT_LENGTH_EXCEEDED.name}: {worker.id} takes {worker.max_context} tokens"
    needed = worker.blocks_for(ask.prompt_tokens)
    if worker.blocks_total and needed > worker.blocks_free:
        return f"{Reason.NO_CAPACITY.name}: {worker.id} has {worker.blocks_free} of {needed} blocks"
    return ""


def candidates(
    workers: Iterable[WorkerState],
    ask: Ask,
    transfer_rate: TransferRate,
    parameters: Parameters,
    *,
    exhaustive: bool = False,
) -> list[Candidate]:
    """Every way to run the request, costed; barred ones carry the reason in `excluded`.

    Pairs grow with prefills x decodes, so only the `shortlist` best of each side and layout are paired (and as many
    barred prefills, for the reason they carry); `exhaustive` pairs all.
    """
    prefills: list[WorkerState] = []
    streams: list[tuple[WorkerState, str]] = []
    barred_prefills: list[tuple[WorkerState, str]] = []
    for worker in workers:
        why = _barred(worker, ask)
        if worker.role is not Role.PREFILL:
            streams.append((worker, why))
        elif why:
            barred_prefills.append((worker, why))
        else:
            prefills.append(worker)
    found: list[Candidate] = []
    decodes: list[tuple[WorkerState, str]] = []
    for worker, why in streams:
        mode = Mode.MERGED if worker.role is Role.MERGED else Mode.LOCAL
        if mode is Mode.LOCAL:
            decodes.append((worker, why))
        found.append(Candidate(mode, worker, None, own_cost(worker, ask, parameters), ask.cached(worker), why))
    if not exhaustive:
        prefills = _shortest(prefills, lambda p: _prefill_side(p, ask), ask, parameters.shortlist)
        usable = [d for d, why in decodes if not why]
        kept = _shortest(usable, lambda d: _decode_side(d, ask), ask, parameters.shortlist)
        decodes = [(d, "") for d in kept]
        barred_prefills = barred_prefills[: parameters.shortlist]
    pairs = [(p, "") for p in prefills] + barred_prefills
    for decode, why_decode in decodes:
        for prefill, why_prefill in pairs:
            why = why_decode or why_prefill
            if not why and prefill.fingerprint != decode.fingerprint:
                why = f"{Reason.KV_LAYOUT_MISMATCH.name}: {prefill.fingerprint} != {decode.fingerprint}"
            terms = pair_cost(prefill, decode, ask, transfer_rate, parameters)
            found.append(Candidate(Mode.DISAGGREGATED, decode, prefill, terms, ask.cached(prefill), why))
    return found


def _prefill_side(prefill: WorkerState, ask: Ask) -> float:
    return queue_seconds(prefill, ask) + prefill_seconds(prefill, ask.prompt_tokens - ask.cached(prefill))


def _decode_side(decode: WorkerState, ask: Ask) -> float:
    return queue_seconds(decode, ask) + sum(_stream_terms(decode, ask).values())


def _shortest(
    workers: list[WorkerState], cost: Callable[[WorkerState], float], ask: Ask, limit: int
) -> list[WorkerState]:
    """The `limit` cheapest of each layout: only equal layouts pair, so one must not crowd out another."""
    if len(workers) <= limit:
        return workers
    kept: Counter[str] = Counter()
    shortest = []
    for worker in sorted(workers, key=lambda w: (cost(w), _spread(ask.uid, w.id))):
        if kept[worker.fingerprint] < limit:
            kept[worker.fingerprint] += 1
            shortest.append(worker)
    return shortest


def _spread(*parts: str) -> int:
    """The same for the same request, different from one request to the next."""
    return zlib.crc32("|".join(parts).encode())


def _best(options: Sequence[Candidate], ask: Ask, parameters: Parameters) -> Candidate | None:
    """The cheapest; among those within `tie_s` of it the preferred mode, then the fewest streams, then a hash of the
    uid: the same for the same request, spread over requests."""
    if not options:
        return None
    limit = min(option.total for option in options) + parameters.tie_s
    tied = [option for option in options if option.total <= limit]
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
    allowed = [c for c in found if not c.excluded and _fits(c.mode, ask)]
    if ask.merged_only and any(c.mode is Mode.MERGED for c in allowed):
        allowed = [c for c in allowed if c.mode is Mode.MERGED]
    winner = _best(allowed, ask, parameters)
    if winner is None:
        return _refusal(found, ask)
    if ask.ttft_slo_s and min(c.ttft for c in allowed) > ask.ttft_slo_s:
        soonest = min(c.ttft for c in allowed)
        return Refusal(
            Reason.NO_CAPACITY, f"first token in {soonest:.2f} s at the soonest, {ask.ttft_slo_s:.2f} s asked"
        )
    return Choice(
        winner,
        _alternate(allowed, winner, ask, parameters),
        _local_is_cheapest(found, winner),
        _why(found, winner, ask),
    )


def _fits(mode: Mode, ask: Ask) -> bool:
    if ask.merged_only:
        return mode is Mode.MERGED or (mode is Mode.LOCAL and not ask.strict)
    return mode is Mode.DISAGGREGATED or not ask.strict


def _alternate(allowed: Sequence[Candidate], winner: Candidate, ask: Ask, parameters: Parameters) -> WorkerState | None:
    """The second-best prefill for the same decode worker."""
    others = [
        c for c in allowed if c.mode is winner.mode and c.worker is winner.worker and c.prefill is not winner.prefill
    ]
    second = _best(others, ask, parameters)
    return second.prefill if second else None


def _local_is_cheapest(found: Sequence[Candidate], winner: Candidate) -> bool:
    """Whether, without the prefill, the decode worker computing alone costs less than any merged worker."""
    local = next((c for c in found if c.mode is Mode.LOCAL and c.worker is winner.worker and not c.excluded), None)
    if local is None:
        return False
    return all(local.total < c.total for c in found if c.mode is Mode.MERGED and not c.excluded)


def _why(found: Sequence[Candidate], winner: Candidate, ask: Ask) -> tuple[RouteReason, ...]:
    if winner.mode is Mode.DISAGGREGATED:
        return (RouteReason.DISAGGREGATED,)
    local = winner.mode is Mode.LOCAL
    if ask.merged_only:
        return (RouteReason.MERGED_ONLY, RouteReason.LOCAL_FALLBACK) if local else (RouteReason.MERGED_ONLY,)
    if any(c.mode is Mode.DISAGGREGATED and not c.excluded for c in found):
        return (RouteReason.LOCAL_CHEAPEST if local else RouteReason.MERGED_CHEAPEST,)
    if not any(c.mode is Mode.LOCAL and not c.excluded for c in found):
        return (RouteReason.NO_DECODE, RouteReason.MERGED_FALLBACK)
    return (RouteReason.PREFILL_UNAVAILABLE, RouteReason.LOCAL_FALLBACK if local else RouteReason.MERGED_FALLBACK)


def _refusal(found: Sequence[Candidate], ask: Ask) -> Refusal:
    """The reason that helps the caller most: what all share, else capacity before absence."""
    streams = [c for c in found if c.mode is not Mode.DISAGGREGATED]
    if ask.strict and not ask.merged_only:
        streams = [c for c in streams if c.mode is Mode.LOCAL]
        if any(not c.excluded for c in streams):
            pairs = [c.excluded for c in found if c.mode is Mode.DISAGGREGATED and c.excluded]
            return _from_exclusions(pairs, Reason.PREFILL_UNAVAILABLE, "no prefill worker can serve this request")
    if ask.merged_only and ask.strict:
        streams = [c for c in streams if c.mode is Mode.MERGED]
    return _from_exclusions(
        [c.excluded for c in streams], Reason.DECODE_UNAVAILABLE, "no decode or merged worker can serve this request"
    )


def _from_exclusions(why: Sequence[str], otherwise: Reason, message: str) -> Refusal:
    names = {text.partition(":")[0] for text in why}
    detail = f"{message}: {'; '.join(sorted(set(why))[:4])}" if why else message
    if Reason.NO_CAPACITY.name in names:
        return Refusal(Reason.NO_CAPACITY, detail)
    for shared in (Reason.CONTEXT_LENGTH_EXCEEDED, Reason.VERSION_MISMATCH, Reason.DRAINING):
        if names == {shared.name}:
            return Refusal(shared, detail)
    return Refusal(otherwise, detail)
