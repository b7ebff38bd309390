"""The fallback policy, at each of its boundaries."""

from __future__ import annotations

from itertools import product

import pytest

from baton.errors import Reason
from baton.route import RouteReason
from baton.worker.fallback import Situation, Step, next_step, route_reason

FAULTS = [Reason.PREFILL_UNAVAILABLE, Reason.KV_CHECKSUM_MISMATCH, Reason.KV_LEASE_LOST, Reason.NO_CAPACITY]


def situation(**changes: object) -> Situation:
    base = {"strict": False, "emitted": False, "alternate_left": False, "local_is_cheapest": False, "choices": 1}
    return Situation(**{**base, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", FAULTS)
def test_order_is_alternate_then_local_then_handback(reason: Reason) -> None:
    assert next_step(reason, situation(alternate_left=True, local_is_cheapest=True)) is Step.ALTERNATE
    assert next_step(reason, situation(local_is_cheapest=True)) is Step.LOCAL
    assert next_step(reason, situation()) is Step.HAND_BACK


def test_strict_always_fails() -> None:
    for reason, emitted, alternate, local, choices in product(FAULTS, *[(True, False)] * 3, (1, 2)):
        now = situation(
            strict=True, emitted=emitted, alternate_left=alternate, local_is_cheapest=local, choices=choices
        )
        assert next_step(reason, now) is Step.FAIL


@pytest.mark.parametrize("reason", [Reason.INVALID_REQUEST, Reason.CONTEXT_LENGTH_EXCEEDED, Reason.DEADLINE_EXCEEDED])
def test_a_request_at_fault_is_not_tried_elsewhere(reason: Reason) -> None:
    assert next_step(reason, situation(alternate_left=True, local_is_cheapest=True)) is Step.FAIL


def test_after_a_first_token_no_other_prefill_draws_another_one() -> None:
    for local, choices in product((True, False), (1, 2)):
        now = situation(emitted=True, alternate_left=True, local_is_cheapest=local, choices=choices)
        assert next_step(Reason.KV_LEASE_LOST, now) is not Step.ALTERNATE


def test_several_choices_with_tokens_out_are_finished_here() -> None:
    assert next_step(Reason.KV_LEASE_LOST, situation(emitted=True, choices=2)) is Step.LOCAL
    assert next_step(Reason.KV_LEASE_LOST, situation(emitted=True, choices=1)) is Step.HAND_BACK


def test_every_reason_has_a_route_reason_that_says_what_failed() -> None:
    for reason in Reason:
        assert route_reason(reason) in RouteReason
    assert route_reason(Reason.KV_CHECKSUM_MISMATCH) is RouteReason.KV_CHECKSUM_MISMATCH
    assert route_reason(Reason.NO_CAPACITY) is RouteReason.PREFILL_NO_CAPACITY
    assert route_reason(Reason.ENGINE_FAILED) is RouteReason.PREFILL_FAILED
