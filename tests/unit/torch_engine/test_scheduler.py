"""What one step holds and who gives way, case by case. (Any order of everything: `test_scheduler_machine`.)"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from baton.engine.admission import Limits
from baton.engine.port import FinishReason, Request, SamplingParams
from baton.engine.torch.sequence import Job
from baton.engine.torch.step import Drawn, Outcome
from baton.errors import BatonError, Reason
from tests.unit.torch_engine.fake_kv import BLOCK, VOCAB, FakeKv, expected, names, next_token

LIMITS = Limits(
    block_size=BLOCK, chunk_tokens=6, max_streams=3, max_jobs=6, max_context=40, vocab_size=VOCAB, eos_token_ids=(0,)
)


def asked(uid: str, length: int, *, max_tokens: int = 4, choices: int = 1, deadline_s: float = 1e6) -> Request:
    prompt = [(ord(uid[0]) + 7 * i) % 29 + 1 for i in range(length)]
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
    return Request(uid, 1, prompt, sampling, b"r" * 16, time.time() + deadline_s, tuple(range(choices)))


def start(kv: FakeKv, request: Request) -> Job:
    job = kv.reserve(request)
    kv.scheduler.generate(job, [], [])
    return job


def planned(kv: FakeKv) -> list[tuple[str, int]]:
    """Who computes how much in the next step; the step is done."""
    outcome = Outcome()
    work = kv.scheduler.plan(outcome)
    kv.forward(work)
    draws = kv.scheduler.computed(work)
    kv.scheduler.apply(work, draws, kv.draw(draws), outcome)
    return [(item.sequence.job.request.uid, item.count) for item in work]


@pytest.fixture
def kv() -> FakeKv:
    return FakeKv(24, LIMITS)


def test_prompts_share_a_chunk_oldest_first_beside_decoding(kv: FakeKv) -> None:
    start(kv, asked("a", 3))
    assert planned(kv) == [("a", 3)]
    start(kv, asked("b", 4))
    start(kv, asked("c", 9))
    assert planned(kv) == [("a", 1), ("b", 4), ("c", 2)]
    assert planned(kv) == [("a", 1), ("b", 1), ("c", 6)]
    assert planned(kv) == [("a", 1), ("b", 1), ("c", 1)]


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    """A quarter of a chunk of 8 is for prompts of two tokens or fewer; what they leave of it the long one has."""
    kv = FakeKv(24, replace(LIMITS, chunk_tokens=8))
    start(kv, asked("a", 30))
    start(kv, asked("b", 3))
    assert planned(kv) == [("a", 8)], "three are not short"
    start(kv, asked("c", 1))
    start(kv, asked("d", 2))
    assert planned(kv) == [("a", 6), ("c", 1), ("d", 1)]
    assert planned(kv) == [("c", 1), ("a", 7), ("d", 1)]
    assert planned(kv) == [("c", 1), ("d", 1), ("a", 8)]


def test_no_room_is_kept_for_a_short_prompt_without_a_place() -> None:
    kv = FakeKv(24, replace(LIMITS, chunk_tokens=8, max_streams=1))
    start(kv, asked("a", 1))
    assert planned(kv) == [("a", 1)]
    kv.scheduler.prefill(kv.reserve(asked("b", 20)))
    start(kv, asked("c", 1))
    assert planned(kv) == [("a", 1), ("b", 8)]


def test_no_room_is_kept_for_a_short_prompt_whose_place_a_long_one_takes() -> None:
    kv = FakeKv(24, replace(LIMITS, chunk_tokens=8, max_streams=2))
    start(kv, asked("a", 1, max_tokens=9))
    assert planned(kv) == [("a", 1)]
    start(kv, asked("b", 20))
    start(kv, asked("c", 1))
    assert planned(kv) == [("a", 1), ("b", 8)]


def test_a_long_prompt_of_the_batch_lane_goes_on_while_short_ones_come() -> None:
    """Where the lane may have less of a step than short prompts may have of a whole one."""
    kv = FakeKv(64, replace(LIMITS, chunk_tokens=64, max_jobs=64, max_streams=4))
    for uid in "abcd":
        kv.scheduler.generate(kv.reserve(replace(asked(uid, 30 if uid == "a" else 12), batch=True)), [], [])
    long = next(job.primary for job in kv.scheduler._jobs.values() if job.request.uid == "a")
    kv.scheduler._prompts(12, batch=True)
    work = kv.scheduler._prompts(12, batch=True)
    assert (work[0].sequence, work[0].count) == (long, 9)


def test_streams_are_bounded_and_the_next_moves_up(kv: FakeKv) -> None:
    for uid in "abcd":
        start(kv, asked(uid, 1, max_tokens=3))
    assert [uid for uid, _ in planned(kv)] == ["a", "b", "c"]
    assert [uid for uid, _ in planned(kv)] == ["a", "b", "c"]
    assert [uid for uid, _ in planned(kv)] == ["a", "b", "c"]
    assert planned(kv) == [("d", 1)]


def test_choices_count_as_streams(kv: FakeKv) -> None:
    """However they come in: computed here, or with first tokens that a peer drew."""
    handed = asked("b", 4, choices=4)
    start(kv, asked("a", 3, choices=2))
    job = kv.reserve(handed)
    kv.load(job, 4)
    kv.scheduler.generate(job, [(c, next_token(job.prompt, c)) for c in handed.choices], [])
    outputs: dict[tuple[str, int], list[int]] = {("b", c): [next_token(job.prompt, c)] for c in handed.choices}
    most = 0
    for _ in range(30):
        for event in kv.step().tokens:
            output = outputs.setdefault((event.uid, event.choice), [])
            assert event.offset == len(output)
            output += event.token_ids
        most = max(most, kv.scheduler.running)
    assert most == LIMITS.max_streams
    for request in (asked("a", 3, choices=2), handed):
        for choice in request.choices:
            assert outputs[request.uid, choice] == expected(request, choice, LIMITS)[0]
    assert kv.scheduler.check_integrity() == []


def test_the_young_do_not_take_what_a_preempted_one_waits_for(kv: FakeKv) -> None:
    """Small newcomers at every step: each could be served at once, and the large one would wait for ever."""
    kv = FakeKv(7, LIMITS)
    old, preempted = asked("a", 7, max_tokens=12), asked("b", 7, max_tokens=12)
    for request in (old, preempted):
        start(kv, request)
    ended: list[str] = []
    refused = 0
    for number in range(60):
        if kv.scheduler.preemptions:
            try:
                start(kv, replace(asked("c", 2, max_tokens=2), uid=f"c{number}"))
            except BatonError as error:
                refused += error.reason is Reason.NO_CAPACITY
        ended += [event.uid for event in kv.step().tokens if event.finish is not None]
    assert refused > 0
    assert [uid for uid in ended if uid in "ab"] == ["a", "b"]
    assert ended.index("b") < 4, "it waited for the young"


def test_prefills_for_peers_need_no_stream(kv: FakeKv) -> None:
    for uid in "abc":
        start(kv, asked(uid, 1, max_tokens=9))
    planned(kv)
    kv.scheduler.prefill(kv.reserve(asked("d", 3)))
    assert ("d", 3) in planned(kv)


def test_the_youngest_gives_way_and_comes_back(kv: FakeKv) -> None:
    kv = FakeKv(6, LIMITS)
    requests = [asked("a", 7, max_tokens=10), asked("b", 7, max_tokens=10)]
    for request in requests:
        start(kv, request)
    outputs: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(60):
        for event in kv.step().tokens:
            outputs[event.uid] += event.token_ids
        if kv.scheduler.preemptions == 1 and len(outputs["a"]) < 10:
            assert kv.scheduler.running == 1
            assert kv.scheduler.waiting == 1
    assert kv.scheduler.preemptions >= 1
    for request in requests:
        assert outputs[request.uid] == expected(request, 0, LIMITS)[0]
    assert kv.scheduler.check_integrity() == []


def test_one_that_waits_for_blocks_is_passed_by_one_that_holds_its_own(kv: FakeKv) -> None:
    """Else both wait for ever: the first for blocks, the second for its turn."""
    kv = FakeKv(8, replace(LIMITS, chunk_tokens=4))
    first = start(kv, asked("a", 8, max_tokens=20))
    for _ in range(2):
        kv.step()
    second = start(kv, asked("b", 12, max_tokens=2))
    ended = set()
    for _ in range(60):
        ended |= {event.uid for event in kv.step().tokens if event.finish is not None}
    assert ended == {"a", "b"}
    assert first.released
    assert second.released


def test_a_request_larger_than_the_pool_is_told(kv: FakeKv) -> None:
    kv = FakeKv(3, LIMITS)
    start(kv, asked("a", 5, max_tokens=30))
    errors = []
    for _ in range(20):
        errors += [event.error for event in kv.step().tokens if event.error is not None]
    assert errors == [Reason.NO_CAPACITY]
    assert kv.scheduler.check_integrity() == []


def test_choices_share_the_prompt(kv: FakeKv) -> None:
    job = start(kv, asked("a", 10, choices=3))
    kv.step()
    kv.step()
    tables = [sequence.slots for sequence in job.sequences]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3, "full blocks"
    assert len({table[2] for table in tables}) == 3, "each its own tail"
    assert kv.scheduler.pinned == 2 + 3 + 1  # and the decode room


def test_generating_in_the_middle_of_the_prefill_that_was_left(kv: FakeKv) -> None:
    """First tokens arrive from a peer between the step's forward pass and its end: the choices fork once."""
    job = kv.reserve(asked("a", 5, choices=2))
    kv.scheduler.prefill(job)
    outcome = Outcome()
    work = kv.scheduler.plan(outcome)
    kv.forward(work)
    draws = kv.scheduler.computed(work)
    kv.scheduler.generate(job, [(c, next_token(job.prompt, c)) for c in (0, 1)], [])
    sequences = list(job.sequences)
    kv.scheduler.apply(work, draws, kv.draw(draws), outcome)
    assert job.sequences == sequences
    assert kv.scheduler.running == 2
    assert not outcome.prefilled
    kv.scheduler.release(job)
    assert kv.scheduler.check_integrity() == []


def test_released_in_a_step_keeps_its_blocks_to_the_end(kv: FakeKv) -> None:
    job = start(kv, asked("a", 5))
    outcome = Outcome()
    work = kv.scheduler.plan(outcome)
    kv.scheduler.release(job)
    assert kv.scheduler.pinned == 3
    assert kv.scheduler.job(job.id) is None
    kv.forward(work)
    kv.scheduler.apply(work, kv.scheduler.computed(work), [], outcome)
    assert (kv.scheduler.pinned, outcome.tokens) == (0, [])
    assert kv.scheduler.check_integrity() == []


def test_ended_by_first_tokens_in_a_step_keeps_its_blocks_to_the_end(kv: FakeKv) -> None:
    """A peer's first token ends the only choice while a step still writes the prompt's blocks."""
    job = kv.reserve(asked("a", 5))
    kv.scheduler.prefill(job)
    outcome = Outcome()
    work = kv.scheduler.plan(outcome)
    kv.scheduler.generate(job, [(0, 5)], [0])
    assert kv.scheduler.pinned == 3
    kv.forward(work)
    kv.scheduler.apply(work, kv.scheduler.computed(work), [], outcome)
    assert (kv.scheduler.pinned, outcome.tokens, outcome.prefilled) == (0, [], [])
    assert kv.scheduler.check_integrity() == []


def test_a_cached_block_that_changed_is_not_used(kv: FakeKv) -> None:
    """Of three cached blocks the second goes bad: one is a hit, the rest is computed again, and found again."""
    request = asked("a", 14, max_tokens=1)
    start(kv, request)
    while kv.scheduler.has_work():
        kv.step()
    keys, _ = names(request)
    kv.memory[kv.pool.match(keys)[1]][2] = b"changed"
    again = start(kv, replace(request, uid="b"))
    assert (again.hit_tokens, kv.scheduler.corrupted_blocks) == (4, 1)
    while kv.scheduler.has_work():
        kv.step()
    last = kv.reserve(replace(request, uid="c"))
    assert (last.hit_tokens, kv.scheduler.corrupted_blocks) == (12, 1)
    kv.scheduler.release(last)
    assert kv.scheduler.check_integrity() == []


def test_a_draw_that_failed_ends_its_request_alone(kv: FakeKv) -> None:
    good, bad = asked("a", 2), asked("b", 2)
    start(kv, good)
    start(kv, bad)
    outcome = Outcome()
    work = kv.scheduler.plan(outcome)
    kv.forward(work)
    draws = kv.scheduler.computed(work)
    kv.scheduler.apply(work, draws, [kv.draw(draws)[0], Drawn(0, None, "no")], outcome)
    assert [(e.uid, e.error) for e in outcome.tokens] == [("a", None), ("b", Reason.INTERNAL)]
    assert kv.scheduler.running == 1


def test_a_deadline_ends_a_request_wherever_it_is(kv: FakeKv) -> None:
    for uid in "abc":
        start(kv, asked(uid, 2, deadline_s=1e6 if uid == "b" else -1))
    waiting = kv.reserve(asked("d", 9, deadline_s=-1))
    kv.scheduler.prefill(waiting)
    outcome = kv.step()
    assert {e.uid for e in outcome.tokens if e.error is Reason.DEADLINE_EXCEEDED} == {"a", "c"}
    assert [(job.request.uid, reason) for job, reason, _ in outcome.failed] == [("d", Reason.DEADLINE_EXCEEDED)]
    assert kv.scheduler.pinned > 0, "a prefill's blocks stay until its release"
    kv.scheduler.release(waiting)


@pytest.mark.parametrize(("most", "finish"), [(1, FinishReason.LENGTH), (4, None)])
def test_the_context_of_a_prefill_ends_no_choice(kv: FakeKv, most: int, finish: FinishReason | None) -> None:
    job = kv.reserve(asked("a", LIMITS.max_context - 1, max_tokens=most))
    kv.scheduler.prefill(job)
    done = [done for _ in range(20) for _, done in kv.step().prefilled]
    assert [token.finish for token in done[0].first] == [finish]
    kv.scheduler.release(job)


def test_first_tokens_that_ended_are_not_continued(kv: FakeKv) -> None:
    job = kv.reserve(asked("a", 4, choices=2))
    kv.load(job, 4)
    kv.scheduler.generate(job, [(0, 5), (1, 6)], [1])
    events = [event for _ in range(6) for event in kv.step().tokens]
    assert {event.choice for event in events} == {0}
    assert events[-1].finish is FinishReason.LENGTH
    assert [event.offset for event in events] == [1, 2, 3]
    assert kv.scheduler.check_integrity() == []


def test_reservations_are_bounded(kv: FakeKv) -> None:
    jobs = [kv.reserve(asked(uid, 1)) for uid in "abcdef"]
    with pytest.raises(BatonError) as caught:
        kv.reserve(asked("g", 1))
    assert caught.value.reason is Reason.NO_CAPACITY
    kv.scheduler.release(jobs[0])
    kv.reserve(asked("g", 1))


def test_embeddings_take_what_prompts_leave_and_a_quarter_at_least(kv: FakeKv) -> None:
    kv = FakeKv(24, replace(LIMITS, chunk_tokens=8))
    first = kv.embed(range(1, 21))
    start(kv, asked("a", 7))
    start(kv, asked("b", 8))
    assert planned(kv) == [("a", 6), (f"embed-{first.id}", 2)], "younger prompts come first"
    assert planned(kv) == [("a", 1), ("b", 5), (f"embed-{first.id}", 2)]
    second = kv.embed([1, 2])
    assert planned(kv) == [("a", 1), ("b", 3), (f"embed-{first.id}", 5)]
    assert planned(kv) == [("a", 1), ("b", 1), (f"embed-{first.id}", 8)], "all of it when nobody else is there"
    assert planned(kv) == [("a", 1), ("b", 1), (f"embed-{first.id}", 3), (f"embed-{second.id}", 2)]
    while kv.scheduler.has_work():
        planned(kv)
    assert kv.scheduler.check_integrity() == []
    assert kv.pool.available == 24


def test_an_embedding_is_refused_without_room_and_ends_at_its_deadline(kv: FakeKv) -> None:
    for ids, reason in (([], Reason.INVALID_REQUEST), ([VOCAB], Reason.INVALID_REQUEST),
                        ([1] * 41, Reason.CONTEXT_LENGTH_EXCEEDED)):  # fmt: skip
        with pytest.raises(BatonError) as caught:
            kv.embed(ids)
        assert (caught.value.reason, caught.value.param) == (reason, "input")
    kv = FakeKv(3, LIMITS)
    kv.embed([1] * 12)
    with pytest.raises(BatonError) as caught:
        kv.embed([1])
    assert caught.value.reason is Reason.NO_CAPACITY
    job = next(iter(kv.scheduler._jobs.values()))
    job.request = replace(job.request, deadline=0.0)
    outcome = kv.step()
    assert [(j, reason) for j, reason, _ in outcome.failed] == [(job, Reason.DEADLINE_EXCEEDED)]
    assert kv.pool.available == 3
