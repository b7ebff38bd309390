"""The simulator's engines against what can be worked out by hand; the router's policy against the aim of the mixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.load import Answer
from bench.mix_figures import compare, figures
from bench.mixes import MIXES, Mix
from bench.sim.cores import Cores, Engine, Job, Speed
from bench.sim.mixed import simulate
from services.router import devices
from services.router.costs import DECODE, MERGED, PREFILL, Parameters

SPEED = Speed(lone_s=0.02, stream_s=0.01, pass_s=0.1, token_s=0.001, handover_s=0.5)
TURNS, SECONDS = 24, 15.0
CHUNK = 256


def test_a_prompt_is_computed_by_chunks_and_its_tokens_come_step_by_step() -> None:
    engine = Engine("m", MERGED, 100, SPEED)
    cores = Cores([[engine]], SPEED)
    answer = Answer()
    engine.line.append(Job(answer, 150, 3))
    cores.advance(10.0)
    assert answer.times == pytest.approx([0.2 + 0.15, 0.35 + 0.02, 0.37 + 0.02])
    assert cores.idle()
    assert cores.now == 10.0


def test_a_chunk_is_a_pause_for_the_streams_of_its_own_engine() -> None:
    engine = Engine("m", MERGED, 100, SPEED)
    cores = Cores([[engine]], SPEED)
    stream = Answer()
    engine.line.append(Job(stream, 10, 3))
    cores.advance(0.11)
    engine.line.append(Job(Answer(), 100, 1))
    cores.advance(10.0)
    assert stream.gaps == pytest.approx([0.02 + 0.2, 0.02])


def test_two_on_a_core_take_twice_as_long_and_a_pair_hands_over() -> None:
    prefill, decode, other = (
        Engine("p", PREFILL, 100, SPEED),
        Engine("d", DECODE, 100, SPEED),
        Engine("m", MERGED, 100, SPEED),
    )
    cores = Cores([[prefill, other], [decode]], SPEED)
    handed, beside = Answer(), Answer()
    prefill.line.append(Job(handed, 100, 2, decode))
    other.line.append(Job(beside, 100, 1))
    assert cores.moving_to(decode) == 1
    cores.advance(10.0)
    assert beside.times == pytest.approx([0.4])
    assert handed.times == pytest.approx([0.4 + 0.5, 0.9 + 0.02])


def test_cores_that_compute_at_the_same_time_slow_each_other() -> None:
    speed = replace(SPEED, beside=0.5)
    prefill, decode = Engine("p", PREFILL, 100, speed), Engine("d", DECODE, 100, speed)
    cores = Cores([[prefill], [decode]], speed)
    short, long = Answer(), Answer()
    prefill.line.append(Job(short, 100, 1))
    decode.line.append(Job(long, 150, 1))
    cores.advance(10.0)
    assert short.times == pytest.approx([0.2 * 1.5]), "both compute"
    assert long.times == pytest.approx([0.2 * 1.5 + 0.15]), "then it is alone"


def test_short_prompts_overtake_long_ones() -> None:
    engine = Engine("m", MERGED, 100, SPEED)
    cores = Cores([[engine]], SPEED)
    long, short = Answer(), Answer()
    engine.line += [Job(long, 500, 1), Job(short, 20, 1)]
    cores.advance(10.0)
    assert short.times == pytest.approx([0.2])
    assert long.times[0] > 1.0


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_ours_is_never_far_below_the_better_of_parted_and_merged(mix: Mix) -> None:
    told = compare(simulate(mix, TURNS, SECONDS, CHUNK, Parameters()))
    for over in (told["ours_over_best"], told["ours_over_best_pooled"]):
        assert over["itl_p99"] <= 1.05
        assert over["goodput"] >= 0.95


def test_where_a_resting_core_is_woken_for_nothing_fewer_answers_are_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours() -> dict[str, Any]:
        return figures(simulate(MIXES[0], TURNS, SECONDS, CHUNK, Parameters(), ("ours",))["ours"])

    known = ours()
    monkeypatch.setattr(devices, "WAKING", 0.0)
    unknown = ours()
    assert unknown["good_share"] < known["good_share"] - 0.02
    assert sum(count for place, count in unknown["placed"].items() if "chat; merged" in place) > 20


def test_where_frozen_streams_count_for_nothing_their_pauses_are_longer() -> None:
    """So the bounds above can be missed."""
    turns = simulate(MIXES[1], TURNS, SECONDS, CHUNK, Parameters(stall_weight=0.0))
    assert compare(turns)["ours_over_best"]["itl_p99"] > 1.3
