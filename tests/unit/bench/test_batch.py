"""The figures of `baton bench batch`."""

from __future__ import annotations

import pytest

from bench.batch import Turn, arrivals, compare, figures
from bench.load import Answer


def answer(sent: float, *times: float) -> Answer:
    return Answer(sent=sent, times=list(times))


def test_idle_is_what_no_chat_was_under_way() -> None:
    turn = Turn([answer(0.0, 1.0, 2.0), answer(1.5, 2.0, 4.0), answer(8.0, 9.0)], 10.0, 0.0, 0.0)
    assert turn.idle == pytest.approx(0.5)
    assert Turn([], 10.0, 0.0, 0.0).idle == 1.0


def test_what_was_used_is_measured_against_what_was_idle() -> None:
    without = figures([Turn([answer(0.0, 1.0, 2.0, 5.0)], 10.0, 0.0, 0.0)])
    beside = figures([Turn([answer(0.0, 1.5, 2.5, 7.0)], 10.0, 400.0, 3.0)])
    told = compare(without, beside, alone_tok_s=100.0)
    assert told["idle_fraction_used"] == pytest.approx(40.0 / 50.0)
    assert told["itl_p99_with_over_without"] == pytest.approx(4.5 / 3.0)
    assert told["ttft_p99_with_over_without"] == pytest.approx(1.5)
    assert told["batch_tok_s"] == 40.0


def test_chats_come_the_same_in_every_turn_of_a_number() -> None:
    assert arrivals(30.0, 1) == arrivals(30.0, 1) != arrivals(30.0, 2)
    assert all(0 < at < 30.0 for at in arrivals(30.0, 1))
