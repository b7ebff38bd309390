"""From answers to figures to ratios: what counts as good, what lies within a turn, which way a ratio goes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.load import Answer
from bench.mix import best_chunk
from bench.mix_figures import Turn, compare, figures, good, turn_of
from bench.mix_show import SETUPS, plot, show
from bench.mixes import MIXES, Idle

IDLE = Idle(document_s=1.0, token_s=0.025, stream_s=0.0)  # SLO: 2 s, 50 ms


def answer(sent: float, *times: float, error: str = "", route: str = "") -> Answer:
    return Answer(sent=sent, times=list(times), error=error, route=route)


def test_good_is_within_both_bounds_and_whole() -> None:
    assert good(answer(0.0, 2.0, 2.05), IDLE)
    assert not good(answer(0.0, 2.01, 2.05), IDLE), "first token late"
    assert not good(answer(0.0, 1.0, 1.06), IDLE), "tokens late"
    assert good(answer(0.0, 1.0, 1.08, 1.09), IDLE), "the mean counts"


def test_a_refusal_an_error_and_silence_are_misses() -> None:
    assert not good(answer(0.0, error="429"), IDLE)
    assert not good(answer(0.0, 1.0, 1.01, error="broken off"), IDLE)
    assert not good(answer(0.0), IDLE)


def test_a_turn_has_the_gaps_and_tokens_within_it_and_counts_requests_sent_within_it() -> None:
    before = [answer(0.0, 9.0, 9.9, 10.1, 10.4)]  # one gap spans the start and is not of the turn
    chats = [answer(10.0, 11.0, 11.5, route="merged; worker=m; reasons=A"), answer(19.0, 19.9, 20.5)]
    documents = [answer(12.0, error="503")]
    turn = turn_of(chats, documents, before, 10.0, 20.0, IDLE)
    assert turn.gaps == pytest.approx((0.3, 0.5))
    assert turn.tokens == 2 + 2 + 1
    assert (turn.sent, turn.good, turn.errors) == (3, 0, 1)
    assert turn.chat_ttfts == pytest.approx((1.0, 0.9))
    assert turn.placed == {"chat; merged; worker=m": 1, "chat; ": 1, "document; error": 1}


def test_an_error_before_the_turn_is_not_hidden() -> None:
    assert turn_of([], [], [answer(0.0, error="503")], 10.0, 20.0, IDLE).errors == 1


def turn(gaps: tuple[float, ...], good: int, sent: int = 10) -> Turn:
    return Turn(10.0, sent, good, 0, 100, gaps, (0.5,), (1.0,), {"chat": sent})


def test_figures_pool_the_turns() -> None:
    f = figures([turn((0.01,) * 99, 8), turn((0.01,) * 49 + (0.5,), 4)])
    assert f["itl_p99_ms"] == 10.0, "one long gap of 149 is above the 99th percentile"
    assert f["goodput"] == 0.6
    assert f["good_share"] == 0.6
    assert f["good_turns"] == ["8/10", "4/10"]
    assert f["itl_p99_ms_turns"] == [10.0, 500.0]
    assert f["placed"] == {"chat": 20}


def setup(*turns: tuple[float, int]) -> list[Turn]:
    """Turns by their ITL in ms and how many of ten were good."""
    return [turn((itl / 1e3,), good) for itl, good in turns]


def test_each_metric_is_compared_with_its_own_best() -> None:
    told = compare({"pd": setup((50.0, 4)), "merged": setup((200.0, 8)), "ours": setup((100.0, 6))})
    assert told["pd_over_merged"] == {"itl_p99": 0.25, "goodput": 0.5}
    assert told["ours_over_best"] == {"itl_p99": 2.0, "goodput": 0.75}
    assert told["better"] == "merged"
    assert told["ours_over_better"] == {"itl_p99": 0.5, "goodput": 0.75}


def test_of_equal_goodput_the_lower_itl_is_better() -> None:
    told = compare({"pd": setup((50.0, 5)), "merged": setup((200.0, 5)), "ours": setup((50.0, 5))})
    assert told["better"] == "pd"
    assert told["ours_over_best"] == told["ours_over_better"] == {"itl_p99": 1.0, "goodput": 1.0}


def test_one_slow_turn_does_not_decide_a_ratio_and_is_told_beside_it() -> None:
    told = compare(
        {
            "pd": setup((40.0, 10), (50.0, 8), (60.0, 9)),
            "merged": setup((400.0, 2), (400.0, 2), (400.0, 2)),
            "ours": setup((42.0, 10), (200.0, 2), (60.0, 9)),
        }
    )
    assert told["ours_over_best"] == {"itl_p99": 1.05, "goodput": 1.0}
    assert told["ours_over_best_pooled"] == {"itl_p99": 3.333, "goodput": 0.778}


def test_nothing_is_divided_by_nothing() -> None:
    silent = [turn((), 0)]
    told = compare({"pd": silent, "merged": silent, "ours": setup((50.0, 5))})
    assert told["ours_over_best"] == told["ours_over_best_pooled"] == {"itl_p99": None, "goodput": None}


def test_a_turn_without_anything_to_divide_by_is_left_out() -> None:
    told = compare(
        {"pd": setup((50.0, 0), (50.0, 4)), "merged": setup((90.0, 0), (90.0, 0)), "ours": setup((50.0, 6), (50.0, 2))}
    )
    assert told["ours_over_best"]["goodput"] == 0.5


def test_the_best_chunk_is_of_the_best_goodput_then_of_the_lowest_itl() -> None:
    slow, fast = figures(setup((200.0, 5))), figures(setup((100.0, 5)))
    assert best_chunk({64: fast, 128: figures(setup((200.0, 6)))}) == 128
    assert best_chunk({64: fast, 128: slow}) == 64


def test_the_tables_name_every_mix_and_the_better_setup(tmp_path: Path) -> None:
    turns = {
        mix.name: {name: [turn((0.01 * (place + 1),) * 9, 5 + place)] for place, name in enumerate(SETUPS)}
        for mix in MIXES[:2]
    }
    result = {}
    for name, of in turns.items():
        result[name] = compare(of) | {setup: figures(ones) for setup, ones in of.items()}
    console = Console(width=200, record=True, file=io.StringIO())
    show(console, result)
    text = console.export_text()
    assert all(mix.name in text for mix in MIXES[:2])
    assert "ours over merged, the better" in text
    plot(turns, str(tmp_path / "mix.png"))
    assert (tmp_path / "mix.png").read_bytes().startswith(b"\x89PNG")
