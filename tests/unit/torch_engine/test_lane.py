"""The batch lane in an engine: what a step may hold of it, and that it gives way."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from baton.engine.admission import Limits
from baton.engine.port import Request
from baton.engine.predict import StepCost
from baton.engine.torch.lane import ALONE_S, BESIDE, LEAST_CHUNK, LEAST_STREAMS, Allowed, Costs, allowed, kept
from baton.engine.torch.step import Outcome
from baton.errors import BatonError, Reason
from tests.unit.torch_engine.fake_kv import BLOCK, VOCAB, FakeKv
from tests.unit.torch_engine.test_scheduler import asked, planned, start

LIMITS = Limits(
    block_size=BLOCK, chunk_tokens=64, max_streams=3, max_jobs=6, max_context=60, vocab_size=VOCAB, eos_token_ids=(0,)
)


# ---- the policy


@pytest.mark.parametrize(
    ("step_s", "room", "costs", "expected"),
    [
        (0.0, 8, Costs(0, 0), Allowed(8, LEAST_CHUNK)),  # alone, nothing learnt
        (0.0, 8, Costs(0.001, 1000), Allowed(8, int(ALONE_S * 1000))),
        (0.0, 8, Costs(0.001, 1e9), Allowed(8, 256)),  # never more than a step's chunk
        (0.0, 0, Costs(0.001, 1000), Allowed(0, int(ALONE_S * 1000))),
        (0.0, 64, Costs(ALONE_S / 20, 1000), Allowed(20, int(ALONE_S * 1000))),
        (0.0, 64, Costs(1.0, 1000), Allowed(LEAST_STREAMS, int(ALONE_S * 1000))),  # some may always go on
        (0.020, 8, Costs(0, 1000), Allowed(0, 0)),  # beside others, what a stream costs is not known
        (0.020, 8, Costs(BESIDE * 0.020, 1000), Allowed(1, 0)),  # exactly the slack
        (0.020, 8, Costs(BESIDE * 0.020 * 1.001, 1000), Allowed(0, 0)),  # a little more than the slack
        (0.020, 8, Costs(BESIDE * 0.020 / 8, 1000), Allowed(8, 0)),
        (0.020, 4, Costs(BESIDE * 0.020 / 8, 1e6), Allowed(4, 256)),  # what streams leave is for prompts
        (0.020, 0, Costs(1.0, LEAST_CHUNK / (BESIDE * 0.020) * 1.001), Allowed(0, LEAST_CHUNK)),
        (0.020, 0, Costs(1.0, LEAST_CHUNK / (BESIDE * 0.020) * 0.999), Allowed(0, 0)),  # a chunk too small is none
    ],
)
def test_what_a_step_may_hold(step_s: float, room: int, costs: Costs, expected: Allowed) -> None:
    assert allowed(step_s, room, 256, costs) == expected


def test_a_part_of_the_pool_is_kept() -> None:
    assert [kept(n) for n in (3, 4, 24)] == [0, 1, 6]


def test_what_a_stream_costs_is_learnt_from_steps_of_different_size() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.learn(0, 4, 0.024)
    assert cost.stream_s == 0.0
    for n in range(200):
        cost.learn(0, 1 + n % 8, 0.020 + 0.001 * (1 + n % 8))
    assert cost.stream_s == pytest.approx(0.001, rel=0.1)


def test_what_else_goes_on_does_not_make_streams_look_cheap() -> None:
    draw = random.Random(1)
    cost = StepCost()
    for n in range(400):
        streams = 1 if n % 10 else 8  # lone streams are disturbed much more often
        cost.learn(0, streams, 0.020 + 0.001 * streams + (draw.choice((0.0, 0.1)) if streams == 1 else 0.0))
    assert cost.stream_s == pytest.approx(0.001, rel=0.1)
    cost.learn(0, 16, 0.001)
    assert cost.stream_s == pytest.approx(0.001, rel=0.1), "one step says little"


def test_a_stream_never_costs_nothing() -> None:
    cost = StepCost()
    for n in range(400):
        cost.learn(0, 1 + n % 8, 0.020)
    assert 0 < cost.stream_s < 0.0001


# ---- the scheduler


def lined(uid: str, length: int, *, max_tokens: int = 4) -> Request:
    """As `asked`, of the batch lane."""
    return replace(asked(uid, length, max_tokens=max_tokens), batch=True)


@pytest.fixture
def kv() -> FakeKv:
    return FakeKv(24, LIMITS)


def teach(kv: FakeKv, stream_s: float) -> None:
    """Steps take 0.1 s and `stream_s` for each stream; prompts 1,000 tokens a second."""
    for _ in range(400):
        for streams in (1, 2):
            kv.scheduler._cost.learn(0, streams, 0.1 + stream_s * streams)
    kv.scheduler._cost.learn(100, 0, 0.1)


def test_streams_of_the_lane_pause_while_others_are_in_a_step(kv: FakeKv) -> None:
    start(kv, lined("b", 3, max_tokens=8))
    assert planned(kv) == [("b", 3)]
    assert planned(kv) == [("b", 1)]
    start(kv, asked("a", 5, max_tokens=3))
    assert planned(kv) == [("a", 5)]
    assert planned(kv) == [("a", 1)]
    assert planned(kv) == [("a", 1)]
    assert planned(kv) == [("b", 1)]
    assert kv.scheduler.preemptions == 0, "its blocks were not needed"


def test_a_stream_that_costs_nothing_goes_on_beside_others(kv: FakeKv) -> None:
    teach(kv, 0.001)
    start(kv, lined("b", 3, max_tokens=8))
    planned(kv)
    start(kv, asked("a", 5))
    assert planned(kv) == [("a", 5)], "a short prompt is a short step"
    assert planned(kv) == [("a", 1), ("b", 1)]


def test_prompts_of_the_lane_wait_for_others_and_come_in_small_chunks(kv: FakeKv) -> None:
    job = start(kv, lined("b", 40))
    assert planned(kv) == [("b", LEAST_CHUNK)]
    start(kv, asked("a", 6, max_tokens=2))
    assert planned(kv) == [("a", 6)]
    assert planned(kv) == [("a", 1)]
    assert planned(kv) == [("b", LEAST_CHUNK)]
    assert job.primary.computed == 2 * LEAST_CHUNK


def test_the_lane_is_refused_while_others_wait(kv: FakeKv) -> None:
    start(kv, asked("a", 40))
    with pytest.raises(BatonError) as refused:
        kv.reserve(lined("b", 3))
    assert refused.value.reason is Reason.NO_CAPACITY
    planned(kv)
    kv.reserve(lined("b", 3))


def test_embeddings_of_the_lane_give_way_as_its_prompts_do(kv: FakeKv) -> None:
    mine = kv.embed([1] * 40, batch=True)
    assert kv.scheduler.batch == (0, 1, 40)
    assert planned(kv) == [(f"embed-{mine.id}", LEAST_CHUNK)]
    theirs = kv.embed([2] * 4)
    with pytest.raises(BatonError, match="others wait"):
        kv.embed([3], batch=True)
    start(kv, asked("a", 6, max_tokens=2))
    assert planned(kv) == [("a", 6), (f"embed-{theirs.id}", 4)]
    assert planned(kv) == [("a", 1)]
    assert planned(kv) == [(f"embed-{mine.id}", LEAST_CHUNK)]
    with pytest.raises(BatonError, match="leaves 6 to others"):
        kv.embed([3] * 36, batch=True)
    assert planned(kv) == [(f"embed-{mine.id}", 40 - 2 * LEAST_CHUNK)]
    assert kv.scheduler.check_integrity() == []


def test_the_lane_takes_no_place_of_others(kv: FakeKv) -> None:
    """Neither in the batch nor in the line; of each there are as many as without it."""
    for uid in "bcd":
        start(kv, lined(uid, 2, max_tokens=9))
    with pytest.raises(BatonError):
        kv.reserve(lined("e", 2))
    for _ in range(2):
        planned(kv)
    assert kv.scheduler.batch == (3, 0, 0)
    for uid in "stuvwx":
        start(kv, asked(uid, 1, max_tokens=3))
    for _ in range(3):
        assert [uid for uid, _ in planned(kv)] == ["s", "t", "u"]
    assert kv.scheduler.batch_preemptions == 3
    while kv.scheduler.has_work():
        planned(kv)
    assert kv.scheduler.check_integrity() == []


def test_blocks_go_to_others_first(kv: FakeKv) -> None:
    """A quarter is left alone; more is given back when it is wanted, and what was given back is computed again."""
    start(kv, lined("b", 4 * BLOCK, max_tokens=6))
    start(kv, lined("c", 8 * BLOCK, max_tokens=6))
    with pytest.raises(BatonError, match="leaves 6 to others"):
        kv.reserve(lined("d", 4 * BLOCK))
    for _ in range(4):
        planned(kv)
    start(kv, asked("a", 12 * BLOCK, max_tokens=3))
    assert kv.scheduler.batch_preemptions == 1, "the youngest"
    told: list[str] = []
    while kv.scheduler.has_work():
        told += [uid for uid, _ in planned(kv)]
    assert told[:3] == ["a"] * 3, "first of all"
    assert {"b", "c"} <= set(told)
    assert kv.scheduler.check_integrity() == []
    assert kv.pool.available == 24


def test_alone_one_of_the_lane_may_have_the_whole_pool() -> None:
    kv = FakeKv(12, LIMITS)
    start(kv, lined("b", 11 * BLOCK - 2, max_tokens=5))
    for _ in range(20):
        planned(kv)
    assert not kv.scheduler.has_work()
    assert kv.scheduler.preemptions == 0


# ---- steps that nobody waits for


@pytest.mark.parametrize("how", ["prompt", "stream", "embedding", "grammar"])
def test_a_step_of_the_lane_is_given_up_when_others_come(kv: FakeKv, how: str) -> None:
    start(kv, lined("b", 20))
    work = kv.scheduler.plan(Outcome())
    assert kv.scheduler.wanted(work)
    start(kv, lined("c", 3))
    assert kv.scheduler.wanted(work), "one of its own"
    asking = kv.reserve(asked("a", 5, max_tokens=3))
    assert kv.scheduler.wanted(work), "it waits for a peer: there is nothing to do for it"
    if how == "prompt":
        kv.scheduler.generate(asking, [], [])
    elif how == "stream":
        kv.load(asking, 5)
        kv.scheduler.generate(asking, [(0, 7)], [])
    elif how == "embedding":
        kv.embed([1, 2])
    else:
        kv.scheduler.hurry()
    assert not kv.scheduler.wanted(work)
    kv.give_up(work)
    kv.scheduler.release(asking)
    assert kv.scheduler.wanted(kv.scheduler.plan(Outcome())), "once is enough"
    kv.scheduler.give_up()
    while kv.scheduler.has_work():
        kv.step()
    assert kv.scheduler.given_up_steps == 2
    assert kv.scheduler.check_integrity() == []


def test_a_step_that_others_share_is_never_given_up_for_others(kv: FakeKv) -> None:
    teach(kv, 0.001)
    start(kv, lined("b", 3, max_tokens=8))
    planned(kv)
    start(kv, asked("a", 5, max_tokens=3))
    planned(kv)
    work = kv.scheduler.plan(Outcome())
    assert {w.sequence.job.batch for w in work} == {False, True}
    start(kv, asked("d", 5))
    assert kv.scheduler.wanted(work)


@pytest.mark.parametrize("batch", [False, True])
def test_a_step_whose_requests_are_all_cancelled_is_given_up(kv: FakeKv, batch: bool) -> None:
    jobs = [start(kv, replace(asked(uid, 3), batch=batch)) for uid in "ab"]
    work = kv.scheduler.plan(Outcome())
    kv.scheduler.release(jobs[0])
    assert kv.scheduler.wanted(work)
    kv.scheduler.release(jobs[1])
    assert not kv.scheduler.wanted(work)
    kv.give_up(work)
    assert not kv.scheduler.has_work()
    assert kv.scheduler.check_integrity() == []
    assert kv.pool.available == 24


# ---- pauses


def test_paused_nothing_of_the_lane_is_computed_and_nothing_is_lost(kv: FakeKv) -> None:
    start(kv, lined("b", 3, max_tokens=4))
    start(kv, lined("c", 40))
    assert planned(kv) == [("b", 3), ("c", LEAST_CHUNK - 3)]
    work = kv.scheduler.plan(Outcome())
    kv.scheduler.pause_batch(3600.0)
    assert not kv.scheduler.wanted(work)
    kv.give_up(work)
    assert planned(kv) == []
    start(kv, asked("a", 5, max_tokens=2))
    assert planned(kv) == [("a", 5)]
    assert planned(kv) == [("a", 1)]
    assert planned(kv) == []
    kv.scheduler.pause_batch(0.0)
    assert planned(kv) == [], "it makes no pause shorter"
    assert kv.scheduler.preemptions == 0
    kv.scheduler._batch_paused_until = 0.0
    while kv.scheduler.has_work():
        planned(kv)
    assert kv.scheduler.check_integrity() == []


def test_a_pause_ends_by_itself(kv: FakeKv) -> None:
    kv.scheduler.pause_batch(0.05)
    start(kv, lined("b", 3, max_tokens=4))
    end = time.monotonic() + 30
    while kv.scheduler.has_work():
        planned(kv)
        assert time.monotonic() < end


# ---- blocks


def test_prompts_that_cannot_be_given_back_have_a_quarter_at_most(kv: FakeKv) -> None:
    """Six of 24 blocks; what generates, or is embedded, may have more, for it gives them back."""
    first = kv.reserve(lined("b", 10 * BLOCK))
    with pytest.raises(BatonError, match="cannot give back"):
        kv.reserve(lined("c", 1))
    kv.scheduler.release(first)
    for uid in "bc":
        kv.scheduler.prefill(kv.reserve(lined(uid, 2 * BLOCK)))
    assert kv.scheduler.batch_blocks == 0
    with pytest.raises(BatonError, match="6 blocks are what the batch lane cannot give back"):
        kv.reserve(lined("d", 1))


def test_what_generates_is_free_for_others_before_it_has_ended(kv: FakeKv) -> None:
    start(kv, lined("b", 6 * BLOCK, max_tokens=6))
    start(kv, lined("c", 6 * BLOCK, max_tokens=6))
    held = kv.scheduler.batch_blocks
    assert held == kv.scheduler.pinned == 14
    job = kv.reserve(asked("a", 13 * BLOCK))
    assert kv.scheduler.batch_preemptions == 1
    assert kv.scheduler.batch_blocks == 7
    kv.scheduler.release(job)
    while kv.scheduler.has_work():
        planned(kv)
    assert kv.scheduler.check_integrity() == []


def test_an_input_of_the_lane_gives_its_blocks_back_and_is_told_to_come_again(kv: FakeKv) -> None:
    mine = kv.embed([1] * 15 * BLOCK, batch=True)
    assert kv.scheduler.batch_blocks == 15
    kv.scheduler.release(kv.reserve(asked("a", 8 * BLOCK)))
    assert kv.scheduler.take_dropped() == []
    kv.scheduler.release(kv.reserve(asked("a", 9 * BLOCK)))
    assert kv.scheduler.take_dropped() == [mine]
    assert kv.scheduler.take_dropped() == []
    assert kv.scheduler.check_integrity() == []
