"""A long step is not a stuck engine."""

from __future__ import annotations

from baton.engine.progress import STALL_FACTOR, STALL_S, UNKNOWN_S, stuck


def test_idle_is_not_stuck() -> None:
    assert not stuck(0.0, 0.0, 1e9)


def test_a_short_step_has_a_floor() -> None:
    assert not stuck(100.0, 0.01, 100.0 + STALL_S - 0.01)
    assert stuck(100.0, 0.01, 100.0 + STALL_S + 0.01)


def test_a_long_step_is_measured_by_its_prediction() -> None:
    assert not stuck(100.0, 10.0, 100.0 + 10 * STALL_FACTOR - 0.01)
    assert stuck(100.0, 10.0, 100.0 + 10 * STALL_FACTOR + 0.01)


def test_before_anything_was_learnt_it_may_take_long() -> None:
    assert not stuck(100.0, 0.0, 100.0 + UNKNOWN_S - 0.01)
    assert stuck(100.0, 0.0, 100.0 + UNKNOWN_S + 0.01)
