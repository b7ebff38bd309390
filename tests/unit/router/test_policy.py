"""Boundaries of the routing policy: where one mode becomes cheaper than another, who is left out, how ties spread."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import Reason
from baton.route import RouteReason
from services.router.costs import (
    Ask,
    Parameters,
    Role,
    Told,
    WorkerState,
    own_cost,
    pair_cost,
    prefill_seconds,
    queue_seconds,
)
from services.router.policy import Candidate, Choice, Mode, Refusal, _barred, candidates, choose
from services.router.reservations import Held

P = Parameters()
BLOCK_BYTES = 737_280  # 32 tokens of a 135M model in bf16


def worker(role: Role, number: int = 0, **changes: object) -> WorkerState:
    base = WorkerState(
        id=f"{role}-{number}",
        role=role,
        fingerprint="fp",
        block_size=32,
        block_bytes=BLOCK_BYTES,
        max_context=2048,
        max_streams=64,
        streams=0,
        queued_tokens=0.0,
        blocks_total=1000,
        blocks_free=1000,
        prefill_tok_s=500.0,
        step_s=0.035,
        stream_s=0.035 / 64,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def rate(prefill: str, decode: str) -> float:
    return 2e9


def ask(prompt_tokens: int = 40, **changes: object) -> Ask:
    return replace(Ask(uid="u", prompt_tokens=prompt_tokens, output_tokens=128.0), **changes)  # type: ignore[arg-type]


def fleet() -> list[WorkerState]:
    return [worker(Role.PREFILL), worker(Role.DECODE), worker(Role.MERGED)]


def decide(workers: list[WorkerState], request: Ask, parameters: Parameters = P) -> Choice | Refusal:
    return choose(candidates(workers, request, rate, parameters), request, parameters)


def mode_of(workers: list[WorkerState], request: Ask, parameters: Parameters = P) -> Mode:
    choice = decide(workers, request, parameters)
    assert isinstance(choice, Choice), choice
    return choice.winner.mode


def test_idle_fleet_hands_an_ordinary_prompt_over() -> None:
    for prompt_tokens in (20, 40, 200, 1000):
        choice = decide(fleet(), ask(prompt_tokens))
        assert isinstance(choice, Choice)
        assert choice.winner.mode is Mode.DISAGGREGATED
        assert choice.reasons == (RouteReason.DISAGGREGATED,)


def test_local_below_the_price_of_a_hand_over_and_not_above() -> None:
    """The predicate of README.md: tokens / rate * (assumed * weight + arrivals * decode) < handover + bytes / rate."""
    fast = {"prefill_tok_s": 20_000.0, "step_s": 0.01}
    workers = [worker(Role.PREFILL, **fast), worker(Role.DECODE, **fast)]

    def price(tokens: int) -> float:
        return P.handover_s + -(-tokens // 32) * BLOCK_BYTES / rate("", "")

    def worth(tokens: int) -> float:
        return tokens / 20_000.0 * (P.assumed_streams * P.stall_weight + P.assumed_arrivals_s * 128 * 0.01)

    # a tie goes to the hand-over
    boundary = next(t for t in range(1, 1000) if worth(t) >= price(t) - P.tie_s)
    assert 12 < boundary < 20
    assert mode_of(workers, ask(boundary - 1)) is Mode.LOCAL
    assert mode_of(workers, ask(boundary + 1)) is Mode.DISAGGREGATED


def test_a_full_hit_on_decode_is_not_handed_over() -> None:
    workers = [worker(Role.PREFILL), worker(Role.DECODE)]
    request = ask(1025, hits={"decode-0": 1024, "prefill-0": 0})
    choice = decide(workers, request)
    assert isinstance(choice, Choice)
    assert choice.winner.mode is Mode.LOCAL
    assert choice.winner.cached_tokens == 1024
    assert choice.reasons == (RouteReason.LOCAL_CHEAPEST,)


def test_running_streams_make_local_dearer() -> None:
    """Sixty uncached tokens: worth computing on an idle decode worker whose prefix is warm, not on a busy one."""
    request = ask(1024 + 60, hits={"decode-0": 1024})
    assert mode_of([worker(Role.PREFILL), worker(Role.DECODE)], request) is Mode.LOCAL
    streams = int((1084 / 500.0) / (60 / 500.0)) + 2
    assert mode_of([worker(Role.PREFILL), worker(Role.DECODE, streams=streams)], request) is Mode.DISAGGREGATED


def test_a_queue_at_the_prefill_moves_requests_to_merged() -> None:
    workers = fleet()
    at_boundary = decide(workers, ask(200))
    assert isinstance(at_boundary, Choice)
    merged = own_cost(workers[2], ask(200), P).total
    pair = at_boundary.winner.total
    slack = (merged - pair) * 500.0
    workers[0] = replace(workers[0], queued_tokens=slack - 10)
    assert mode_of(workers, ask(200)) is Mode.DISAGGREGATED
    workers[0] = replace(workers[0], queued_tokens=slack + 10)
    choice = decide(workers, ask(200))
    assert isinstance(choice, Choice)
    assert choice.winner.mode is Mode.MERGED
    assert choice.reasons == (RouteReason.MERGED_CHEAPEST,)
    assert 6 < slack / 200 < 8, "about seven prompts like this one may wait"


def test_stall_counts_every_frozen_stream_and_the_assumed_one() -> None:
    idle = own_cost(worker(Role.DECODE), ask(500), P).stall
    eight = own_cost(worker(Role.DECODE, streams=8), ask(500), P).stall
    assert idle == pytest.approx(1.0 * P.stall_weight)
    assert eight == pytest.approx(9.0 * P.stall_weight)
    assert own_cost(worker(Role.DECODE, streams=8), ask(500), Parameters(stall_weight=0.5)).stall == pytest.approx(4.5)


def test_prefill_is_never_shorter_than_a_step() -> None:
    assert prefill_seconds(worker(Role.PREFILL), 1) == 0.035
    assert prefill_seconds(worker(Role.PREFILL), 500) == 1.0
    assert prefill_seconds(worker(Role.PREFILL), 0) == 0.0


def test_a_prefill_that_never_steps_is_judged_by_the_decodes_step() -> None:
    slow_start = worker(Role.PREFILL, step_s=0.2)
    assert pair_cost(slow_start, worker(Role.DECODE), ask(5), rate, P).prefill == 0.035
    assert pair_cost(worker(Role.PREFILL), worker(Role.DECODE, step_s=0.2), ask(5), rate, P).prefill == 0.035


def test_queue_begins_when_the_streams_are_full() -> None:
    assert queue_seconds(worker(Role.DECODE, streams=63), ask()) == 0.0
    one = queue_seconds(worker(Role.DECODE, streams=64), ask())
    assert one == pytest.approx(128 * 0.035 * (1 + 63 / 64) / 64), "with the step of a full batch"
    assert queue_seconds(worker(Role.DECODE, streams=65), ask()) == pytest.approx(2 * one)
    assert queue_seconds(worker(Role.PREFILL, streams=500), ask()) == 0.0


def test_a_queue_passes_while_nobody_reports() -> None:
    prefill = worker(Role.PREFILL, queued_tokens=500.0, max_context=0, as_of=100.0)
    assert queue_seconds(prefill, ask(now=100.0)) == pytest.approx(1.0)
    assert queue_seconds(prefill, ask(now=100.4)) == pytest.approx(0.6)
    assert queue_seconds(prefill, ask(now=103.0)) == 0.0
    told = Told(streams=0, queued_tokens=500.0, queued_short=0.0, blocks_free=1000, at=100.0)
    prefill.promise(told, Held(50.0, 0, 3), 0.0, 100.8)
    assert (prefill.queued_tokens, prefill.as_of) == (pytest.approx(150.0), 100.8)
    assert prefill.longest == 996 * 32
    prefill.promise(told, Held(50.0, 0, 0, short_tokens=50.0), 0.0, 109.0)
    assert (prefill.queued_tokens, prefill.queued_short) == (50.0, 50.0), "only what was promised since"


def test_a_short_prompt_waits_for_the_step_under_way_and_for_other_short_ones() -> None:
    """Of 256 tokens a step, 64 are for short ones: each 64 of them ahead are a step of 256 at 500 a second."""
    queue = partial(worker, Role.PREFILL, queued_tokens=5000.0, chunk_tokens=256, short_tokens=64)
    assert queue_seconds(queue(), ask(64)) == pytest.approx(0.5 * 256 / 500)
    assert queue_seconds(queue(queued_short=128.0), ask(64)) == pytest.approx(2.5 * 256 / 500)
    assert queue_seconds(queue(queued_short=5000.0), ask(64)) == pytest.approx(10.0), "never more than all of it"
    assert queue_seconds(queue(), ask(65)) == pytest.approx(10.0)
    assert queue_seconds(queue(), ask(1024 + 64, hits={"prefill-0": 1024})) == pytest.approx(0.5 * 256 / 500)


def test_short_prompts_do_not_all_queue_where_they_overtake_a_long_one() -> None:
    busy = worker(Role.PREFILL, queued_tokens=2000.0, chunk_tokens=256, short_tokens=64)
    others = [worker(Role.DECODE), worker(Role.MERGED, streams=2)]
    assert mode_of([busy, *others], ask(60)) is Mode.DISAGGREGATED
    full = replace(busy, queued_tokens=2900.0, queued_short=900.0)
    assert mode_of([full, *others], ask(60)) is not Mode.DISAGGREGATED


def test_the_decode_queue_passes_while_the_prefill_computes() -> None:
    decode = worker(Role.DECODE, queued_tokens=250.0)  # half a second
    terms = pair_cost(worker(Role.PREFILL), decode, ask(500), rate, P)
    assert terms.queue == 0.0
    terms = pair_cost(worker(Role.PREFILL), decode, ask(100), rate, P)
    assert terms.queue == pytest.approx(0.3)


def test_transfer_is_only_what_decode_lacks() -> None:
    pair = worker(Role.PREFILL), worker(Role.DECODE)
    assert pair_cost(*pair, ask(64), rate, P).transfer == pytest.approx(P.handover_s + 2 * BLOCK_BYTES / 2e9)
    warm = ask(65, hits={"decode-0": 64})
    assert pair_cost(*pair, warm, rate, P).transfer == pytest.approx(P.handover_s + BLOCK_BYTES / 2e9)


def test_hits_never_cover_the_last_token() -> None:
    assert ask(64, hits={"decode-0": 64}).cached(worker(Role.DECODE)) == 32
    assert ask(65, hits={"decode-0": 64}).cached(worker(Role.DECODE)) == 64


@given(st.integers(1, 400), st.integers(0, 12), st.sampled_from([0, 10]), st.sampled_from([0, 1, 64, 200, 320, 321]))
def test_a_worker_that_is_barred_is_told_why(prompt: int, free: int, blocks: int, context: int) -> None:
    """Whoever takes a prompt of that length is not asked why not: the two must agree."""
    one = worker(Role.MERGED, blocks_free=free, blocks_total=blocks, max_context=context)
    assert bool(_barred(one, ask(prompt))) == (prompt > one.longest)
    assert replace(one, unusable="DRAINING: x").longest == -1.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unusable": "QUARANTINED: prefill-0: down"}, Reason.PREFILL_UNAVAILABLE),
        ({"blocks_free": 2}, Reason.NO_CAPACITY),
        ({"unusable": "DRAINING: prefill-0"}, Reason.DRAINING),
        ({"fingerprint": "other"}, Reason.PREFILL_UNAVAILABLE),
        ({"unusable": "VERSION_MISMATCH: prefill-0: tokenizer"}, Reason.VERSION_MISMATCH),
        ({"max_context": 40}, Reason.CONTEXT_LENGTH_EXCEEDED),  # its first token needs a place as well
    ],
)
def test_strict_names_what_is_wrong_with_the_prefills(change: dict[str, object], reason: Reason) -> None:
    workers = [worker(Role.PREFILL, **change), worker(Role.DECODE), worker(Role.MERGED)]
    refusal = decide(workers, ask(40, strict=True))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is reason
    assert isinstance(decide(workers, ask(40)), Choice)


def test_strict_without_a_decode_and_without_a_prefill() -> None:
    no_decode = decide([worker(Role.PREFILL), worker(Role.MERGED)], ask(strict=True))
    assert isinstance(no_decode, Refusal)
    assert no_decode.reason is Reason.DECODE_UNAVAILABLE
    no_prefill = decide([worker(Role.DECODE), worker(Role.MERGED)], ask(strict=True))
    assert isinstance(no_prefill, Refusal)
    assert no_prefill.reason is Reason.PREFILL_UNAVAILABLE


def test_strict_hands_over_even_where_local_is_cheaper() -> None:
    warm = ask(201, hits={"decode-0": 192})
    assert mode_of(fleet(), warm) is Mode.LOCAL
    assert mode_of(fleet(), replace(warm, strict=True)) is Mode.DISAGGREGATED


def test_without_prefill_merged_or_local_and_the_reason_says_so() -> None:
    busy = worker(Role.DECODE, streams=8)
    choice = decide([busy, worker(Role.MERGED)], ask(200))
    assert isinstance(choice, Choice)
    assert choice.winner.mode is Mode.MERGED
    assert choice.reasons == (RouteReason.PREFILL_UNAVAILABLE, RouteReason.MERGED_FALLBACK)
    choice = decide([busy], ask(200))
    assert isinstance(choice, Choice)
    assert choice.winner.mode is Mode.LOCAL
    assert choice.reasons == (RouteReason.PREFILL_UNAVAILABLE, RouteReason.LOCAL_FALLBACK)


def test_without_decode_merged_and_the_reason_says_so() -> None:
    choice = decide([worker(Role.PREFILL), worker(Role.MERGED)], ask(200))
    assert isinstance(choice, Choice)
    assert choice.reasons == (RouteReason.NO_DECODE, RouteReason.MERGED_FALLBACK)


def test_merged_only_takes_merged_then_local_and_strict_only_merged() -> None:
    assert mode_of(fleet(), ask(200, merged_only=True)) is Mode.MERGED
    choice = decide(fleet()[:2], ask(200, merged_only=True))
    assert isinstance(choice, Choice)
    assert choice.winner.mode is Mode.LOCAL
    assert choice.reasons == (RouteReason.MERGED_ONLY, RouteReason.LOCAL_FALLBACK)
    refusal = decide(fleet()[:2], ask(200, merged_only=True, strict=True))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.DECODE_UNAVAILABLE


def test_excluded_workers_are_left_out_whatever_their_role() -> None:
    assert mode_of(fleet(), ask(200, exclude=frozenset({"prefill-0"}))) is Mode.MERGED
    assert mode_of(fleet(), ask(200, exclude=frozenset({"decode-0"}))) is Mode.MERGED
    refusal = decide(fleet(), ask(200, exclude=frozenset({"decode-0", "merged-0"})))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.DECODE_UNAVAILABLE


def test_capacity_is_refused_only_when_nobody_has_room() -> None:
    full = worker(Role.DECODE, blocks_free=2)  # 40 tokens take two blocks and one more
    assert mode_of([worker(Role.PREFILL), full, worker(Role.MERGED)], ask(40)) is Mode.MERGED
    refusal = decide([worker(Role.PREFILL), full], ask(40))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.NO_CAPACITY
    assert isinstance(decide([worker(Role.PREFILL), replace(full, blocks_free=3)], ask(40)), Choice)


def test_an_unreachable_slo_is_refused_early() -> None:
    refusal = decide(fleet(), ask(1000, ttft_slo_s=1.9))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.NO_CAPACITY
    assert isinstance(decide(fleet(), ask(1000, ttft_slo_s=2.1)), Choice)


def test_with_an_slo_the_winner_is_the_cheapest_in_time() -> None:
    slow = worker(Role.MERGED, 0, prefill_tok_s=400.0)  # 0.8 s to the first token, and nobody waits meanwhile
    busy = worker(Role.MERGED, 1, streams=10)  # 0.64 s, in which ten streams stand still
    busier = worker(Role.MERGED, 2, streams=20)

    def winner(**changes: float) -> str:
        choice = decide([slow, busier, busy], ask(320, **changes))
        assert isinstance(choice, Choice), choice
        return choice.winner.worker.id

    assert winner() == winner(ttft_slo_s=2.0) == slow.id
    assert winner(ttft_slo_s=0.75) == busy.id
    refusal = decide([slow, busy], ask(320, ttft_slo_s=0.5))
    assert isinstance(refusal, Refusal)
    assert refusal.late


def test_only_equal_layouts_pair() -> None:
    other = worker(Role.DECODE, 1, fingerprint="other")
    found = candidates([worker(Role.PREFILL), worker(Role.DECODE), other], ask(200), rate, P)
    pairs = {c.worker.id: c.excluded for c in found if c.mode is Mode.DISAGGREGATED}
    assert pairs["decode-0"] == ""
    assert pairs["decode-1"].startswith("KV_LAYOUT_MISMATCH: ")


def test_one_layout_does_not_crowd_another_out_of_the_shortlist() -> None:
    fast = [worker(Role.PREFILL, i, prefill_tok_s=5000.0, fingerprint="other") for i in range(20)]
    workers = [*fast, worker(Role.PREFILL, 99), worker(Role.DECODE)]
    choice = decide(workers, ask(200))
    assert isinstance(choice, Choice)
    assert choice.winner.prefill is not None
    assert choice.winner.prefill.id == "prefill-99"


def test_the_alternate_is_the_second_best_prefill() -> None:
    workers = [worker(Role.PREFILL, i, queued_tokens=100.0 * i) for i in range(4)] + [worker(Role.DECODE, streams=20)]
    choice = decide(workers, ask(500))
    assert isinstance(choice, Choice)
    assert choice.winner.prefill is not None
    assert choice.winner.prefill.id == "prefill-0"
    assert choice.alternate is not None
    assert choice.alternate.id == "prefill-1"
    lone = decide([workers[0], workers[4]], ask(500))
    assert isinstance(lone, Choice)
    assert lone.alternate is None


def test_local_is_cheapest_is_the_comparison_with_merged() -> None:
    """A decode worker that holds the prefix is cheaper than merged; one with streams to freeze is not."""
    warm = decide(fleet(), ask(201, hits={"decode-0": 192}, strict=True))
    busy = decide([fleet()[0], worker(Role.DECODE, streams=4), fleet()[2]], ask(200))
    assert isinstance(warm, Choice)
    assert warm.local_is_cheapest
    assert isinstance(busy, Choice)
    assert busy.winner.mode is Mode.DISAGGREGATED
    assert not busy.local_is_cheapest
    alone = decide([fleet()[0], worker(Role.DECODE, streams=4)], ask(200))
    assert isinstance(alone, Choice)
    assert alone.local_is_cheapest


def test_all_pairs_are_shown_until_there_are_too_many_and_then_every_worker() -> None:
    few = [worker(role, n) for role in (Role.PREFILL, Role.DECODE) for n in range(20)]
    shown = candidates(few, ask(200), rate, P, exhaustive=True)
    assert sum(c.mode is Mode.DISAGGREGATED for c in shown) == 400
    many = [worker(role, n) for role in (Role.PREFILL, Role.DECODE) for n in range(200)]
    many += [worker(Role.PREFILL, 999, unusable="DRAINING: prefill-999")]
    shown = candidates(many, ask(200), rate, P, exhaustive=True)
    assert len(shown) < 1000
    assert {c.worker.id for c in shown} | {c.prefill.id for c in shown if c.prefill} == {w.id for w in many}


def test_ties_are_the_same_for_one_request_and_spread_over_many() -> None:
    workers = [worker(Role.PREFILL, i) for i in range(4)] + [worker(Role.DECODE, i) for i in range(2)]
    assert decide(workers, ask(200)) == decide(list(reversed(workers)), ask(200))
    seen: Counter[str] = Counter()
    for number in range(400):
        choice = decide(workers, ask(200, uid=f"u{number}"))
        assert isinstance(choice, Choice)
        assert choice.winner.prefill is not None
        seen[choice.winner.prefill.id] += 1
    assert min(seen.values()) > 60


def test_a_hot_prefix_does_not_pin_its_worker() -> None:
    hot = worker(Role.PREFILL, 0)
    cold = worker(Role.PREFILL, 1)
    decode = worker(Role.DECODE, streams=40)
    request = ask(600, hits={"prefill-0": 320})

    def chosen(queued: float) -> str:
        choice = decide([replace(hot, queued_tokens=queued), cold, decode], request)
        assert isinstance(choice, Choice)
        assert choice.winner.prefill is not None
        return choice.winner.prefill.id

    assert chosen(319.0) == "prefill-0"
    assert chosen(322.0) == "prefill-1"


@given(
    st.lists(
        st.builds(
            worker,
            st.sampled_from(Role),
            st.integers(0, 6),
            streams=st.integers(0, 90),
            queued_tokens=st.floats(0, 5000),
            blocks_free=st.integers(0, 200),
            prefill_tok_s=st.floats(10, 1e5),
            step_s=st.floats(1e-4, 0.2),
            prefill_share=st.floats(0, 1),
            fingerprint=st.sampled_from(["a", "b"]),
            unusable=st.sampled_from(["", "", "", "DRAINING: x"]),
        ),
        max_size=12,
        unique_by=lambda w: w.id,
    ),
    st.integers(1, 3000),
    st.booleans(),
    st.booleans(),
)
def test_any_choice_is_allowed_and_cheapest(
    workers: list[WorkerState], tokens: int, strict: bool, merged_only: bool
) -> None:
    request = ask(tokens, strict=strict, merged_only=merged_only)
    everything = candidates(workers, request, rate, P, exhaustive=True)
    assert all(min(c.terms) >= 0.0 for c in everything)
    result = choose(everything, request, P)
    assert result == choose(list(reversed(everything)), request, P)
    if isinstance(result, Refusal):
        assert not strict or not any(c.mode is Mode.DISAGGREGATED and not c.excluded for c in everything) or merged_only
        if not strict:
            streaming = [c for c in everything if c.mode is not Mode.DISAGGREGATED]
            assert all(c.excluded for c in streaming)
        return
    winner: Candidate = result.winner
    assert not winner.excluded
    assert winner.prefill is None or winner.prefill.fingerprint == winner.worker.fingerprint
    assert not strict or winner.mode is Mode.DISAGGREGATED or merged_only
    if not strict and not merged_only:
        assert winner.total <= min(c.total for c in everything if not c.excluded) + P.tie_s


# ---- engines side by side


def test_layouts_that_do_not_pair_are_the_reason_of_the_fallback() -> None:
    other = worker(Role.DECODE, fingerprint="other")
    for merged, mode in (([], Mode.LOCAL), ([worker(Role.MERGED, prefill_tok_s=5000.0)], Mode.MERGED)):
        choice = decide([worker(Role.PREFILL), other, *merged], ask(200))
        assert isinstance(choice, Choice)
        fallback = RouteReason.LOCAL_FALLBACK if mode is Mode.LOCAL else RouteReason.MERGED_FALLBACK
        assert (choice.winner.mode, choice.reasons) == (mode, (RouteReason.KV_LAYOUT_MISMATCH, fallback))


def test_a_prefill_that_is_away_is_the_reason_whoever_else_does_not_pair() -> None:
    away = worker(Role.PREFILL, 1, unusable="QUARANTINED: prefill-1: gone", fingerprint="other")
    choice = decide([worker(Role.PREFILL), away, worker(Role.DECODE, fingerprint="other")], ask(200))
    assert isinstance(choice, Choice)
    assert choice.reasons[0] is RouteReason.PREFILL_UNAVAILABLE


def test_an_engine_without_kv_pairs_with_nobody_and_runs_merged() -> None:
    upstream = worker(Role.MERGED, 1, fingerprint="", block_bytes=0, blocks_total=0, blocks_free=0)
    choice = decide([worker(Role.PREFILL, fingerprint=""), worker(Role.DECODE), upstream], ask(200))
    assert isinstance(choice, Choice)
    assert choice.winner.mode is not Mode.DISAGGREGATED
    assert mode_of([upstream], ask(2000)) is Mode.MERGED


def test_who_lacks_what_is_needed_is_left_out() -> None:
    upstream = worker(Role.MERGED, 1, prefill_tok_s=1e6, lacks=frozenset({"logprobs", "top_k"}))
    workers = [worker(Role.MERGED), upstream]
    for needs, chosen in (((), "merged-1"), (("min_p",), "merged-1"), (("logprobs",), "merged-0")):
        choice = decide(workers, ask(200, needs=frozenset(needs)))
        assert isinstance(choice, Choice)
        assert choice.winner.worker.id == chosen
    refusal = decide([upstream], ask(200, needs=frozenset({"logprobs", "min_p"})))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.INVALID_REQUEST
    assert "LACKS: merged-1 cannot do logprobs" in refusal.message
    away = worker(Role.MERGED, unusable="QUARANTINED: merged-0: gone")
    refusal = decide([upstream, away], ask(200, needs=frozenset({"logprobs"})))
    assert isinstance(refusal, Refusal)
    assert refusal.reason.retryable, "who could do it may come back"
