"""The scheduler against what each request must give, in a pool too small for all of them.

Requests share prefixes, fork, resume, are loaded in part or whole, prefilled for peers, swapped off late reads, and
released at any moment, inside a step too; some are of the batch lane and give way. Whatever happens, a request that
ends has given exactly its own tokens.
"""

from __future__ import annotations

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.admission import Limits
from baton.engine.port import Request, SamplingParams
from baton.engine.torch.sequence import Job, Phase
from baton.engine.torch.step import Draw, Outcome, Work
from baton.errors import BatonError, Reason
from tests.unit.torch_engine.fake_kv import BLOCK, GARBAGE, VOCAB, FakeKv, expected, next_token

SLOTS = 12
LIMITS = Limits(
    block_size=BLOCK, chunk_tokens=6, max_streams=3, max_jobs=6, max_context=40, vocab_size=VOCAB, eos_token_ids=(0,)
)
SHARED = [3, 1, 4, 1, 5, 9]
TEXTS = {
    "first": SHARED + [(7 * i) % 29 + 1 for i in range(20)],
    "second": SHARED + [(5 * i) % 29 + 1 for i in range(20)],
}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(stream_s=st.sampled_from([0.0, 0.0005, 1.0]))
    def start(self, stream_s: float) -> None:
        self.kv = FakeKv(SLOTS, LIMITS)
        if stream_s:  # what a stream costs: little, or more than a step
            for streams in 16 * (1, 2):
                self.kv.scheduler._cost.learn(0, streams, 0.05 + stream_s * streams)
            self.kv.scheduler._cost.learn(100, 0, 0.1)
        self.jobs: list[Job] = []
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], object] = {}
        self.prefilled: set[str] = set()
        self.late: list[int] = []
        self.holds = 0
        self.held: dict[int, list[tuple[int, bytes]]] = {}
        """(slot, key) of what readers outside hold."""
        self.uid = 0
        self.said = [2, 7]
        """Prompt and output of the last request that ended: what a conversation sends next."""
        self.generating: list[Job] = []
        self.embedding: list[Job] = []
        self.embedded: list[Job] = []
        self.failed: set[str] = set()
        self.gone: set[Job] = set()
        self.in_step: tuple[list[Work], Outcome] | None = None
        self.draws: list[Draw] | None = None

    # ---- requests

    @rule(
        text=st.sampled_from(["first", "second", "said"]),
        length=st.integers(1, 24),
        choices=st.integers(1, 3),
        emitted=st.lists(st.integers(1, VOCAB - 1), max_size=3),
        more=st.integers(1, 12),
        ignore_eos=st.booleans(),
        decode_room=st.booleans(),
        batch=st.booleans(),
        then=st.sampled_from(["wait", "generate", "generate", "prefill"]),
    )
    def reserve(
        self,
        text: str,
        length: int,
        choices: int,
        emitted: list[int],
        more: int,
        ignore_eos: bool,
        decode_room: bool,
        batch: bool,
        then: str,
    ) -> None:
        self.uid += 1
        emitted = emitted if choices == 1 else []
        sampling = SamplingParams(max_tokens=len(emitted) + more, seed=1, temperature=0.0, ignore_eos=ignore_eos)
        request = Request(
            str(self.uid),
            1,
            (self.said if text == "said" else TEXTS[text])[:length],
            sampling,
            b"r" * 16,
            time.time() + 1e6,
            tuple(range(choices)),
            emitted,
            batch,
        )
        held = self.kv.scheduler.pinned
        try:
            job = self.kv.reserve(request, decode_room)
        except BatonError as error:
            self.no_capacity(error)
            assert self.kv.scheduler.pinned <= held, "only the batch lane's may have been given back"
            return
        assert job.hit_tokens < len(job.prompt)
        assert job.hit_tokens % BLOCK == 0
        self.jobs.append(job)
        if then == "generate":
            self.start_generating(job, give_first=False)
        elif then == "prefill":
            self.start_prefill(job)

    @staticmethod
    def no_capacity(error: BatonError) -> None:
        """The one refusal that may be met here."""
        if error.reason is not Reason.NO_CAPACITY:
            raise error

    def draw_job(self, data: st.DataObject, *phases: Phase) -> Job | None:
        fitting = [j for j in self.jobs if j.phase in phases and not j.released]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @rule(data=st.data(), blocks=st.integers(1, 8))
    def load(self, data: st.DataObject, blocks: int) -> None:
        job = self.draw_job(data, Phase.RESERVED)
        if job is None:
            return
        room = len(job.primary.slots) * BLOCK
        tokens = min(len(job.prompt), (job.primary.computed // BLOCK + blocks) * BLOCK, room)
        if tokens == len(job.prompt) or tokens % BLOCK == 0:
            self.kv.load(job, max(tokens, job.primary.computed))

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        """Some of the blocks after the loaded ones will be written to by a read that nobody waits for."""
        job = self.draw_job(data, Phase.RESERVED)
        if job is None:
            return
        first = -(-job.primary.computed // BLOCK)
        count = min(-(-len(job.prompt) // BLOCK), len(job.primary.slots))
        blocks = data.draw(st.lists(st.sampled_from(range(first, count)), unique=True)) if first < count else []
        slots = [job.primary.slots[b] for b in blocks]
        after = self.kv.scheduler.swap(job, blocks)
        assert not set(after) & set(slots)
        self.late += slots

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.late))
        self.late.remove(slot)
        self.kv.pool.settle(slot)

    @rule(data=st.data(), give_first=st.booleans())
    def generate(self, data: st.DataObject, give_first: bool) -> None:
        job = self.draw_job(data, Phase.RESERVED, Phase.PREFILL)
        if job is not None:
            self.start_generating(job, give_first)

    def start_generating(self, job: Job, give_first: bool) -> None:
        first: list[tuple[int, int]] = []
        done: list[int] = []
        request = job.request
        if give_first:
            for choice in request.choices:
                token = next_token(job.prompt, choice)
                first.append((choice, token))
                finish = self.kv.scheduler._finish(job, len(job.prompt) + 1, token)
                if finish is not None:
                    done.append(choice)
                    self.ended[request.uid, choice] = finish
                stop = finish is not None and finish.value == "stop"
                self.outputs[request.uid, choice] = list(request.emitted_ids) + ([] if stop else [token])
        try:
            self.kv.scheduler.generate(job, first, done)
            self.generating.append(job)
        except BatonError as error:
            self.no_capacity(error)
            self.kv.scheduler.release(job)

    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        job = self.draw_job(data, Phase.RESERVED)
        if job is not None:
            self.start_prefill(job)

    def start_prefill(self, job: Job) -> None:
        try:
            self.kv.scheduler.prefill(job)
        except BatonError as error:
            self.no_capacity(error)
            self.kv.scheduler.release(job)

    @rule(text=st.sampled_from(["first", "second", "said"]), length=st.integers(1, 24), batch=st.booleans())
    def embed(self, text: str, length: int, batch: bool) -> None:
        ids = (self.said if text == "said" else TEXTS[text])[:length]
        held = self.kv.scheduler.pinned
        try:
            job = self.kv.embed(ids, batch=batch)
        except BatonError as error:
            self.no_capacity(error)
            assert self.kv.scheduler.pinned <= held  # the batch lane may have given way, and not enough
            return
        self.jobs.append(job)
        self.embedding.append(job)

    @rule(data=st.data())
    def stop_prefill(self, data: st.DataObject) -> None:
        job = self.draw_job(data, Phase.PREFILL)
        if job is not None:
            self.kv.scheduler.stop_prefill(job)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        job = self.draw_job(data, Phase.RESERVED, Phase.PREFILL, Phase.GENERATE, Phase.EMBED)
        if job is not None:
            self.gone.add(job)
            self.kv.scheduler.release(job)

    @rule(data=st.data())
    def hold_for_a_reader(self, data: st.DataObject) -> None:
        """What is sealed stays as it is until the reader has gone, whoever else needs the room."""
        known = self.kv.pool.keys
        if not known or len(self.held) >= 3:
            return
        keys = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=4))
        self.holds += 1
        slots = self.kv.scheduler.holds.take(self.holds, keys)
        self.held[self.holds] = [(slot, key) for slot, key in zip(slots, keys, strict=True)]

    @rule(data=st.data())
    def reader_goes(self, data: st.DataObject) -> None:
        if self.held:
            number = data.draw(st.sampled_from(sorted(self.held)))
            del self.held[number]
            self.kv.scheduler.holds.drop(number)

    # ---- steps, of which other messages may come in the middle

    @precondition(lambda self: self.in_step is None)
    @rule()
    def begin_step(self) -> None:
        outcome = Outcome()
        work = self.kv.scheduler.plan(outcome)
        assert sum(w.count for w in work if w.sequence in self.kv.scheduler._waiting) <= LIMITS.chunk_tokens
        assert sum(w.sequence in self.kv.scheduler._running for w in work) <= LIMITS.max_streams
        for slot in self.late:
            self.kv.memory[slot] = [GARBAGE] * BLOCK  # the late bytes
        self.in_step = (work, outcome)

    @precondition(lambda self: self.in_step is None)
    @rule(count=st.integers(1, 6))
    def whole_steps(self, count: int) -> None:
        for _ in range(count):
            self.begin_step()
            self.compute()
            self.end_step()

    @precondition(lambda self: self.in_step is not None and self.draws is None)
    @rule()
    def compute(self) -> None:
        assert self.in_step is not None
        self.kv.forward(self.in_step[0])
        self.draws = self.kv.scheduler.computed(self.in_step[0])

    @precondition(lambda self: self.in_step is not None and self.draws is None)
    @rule()
    def give_up(self) -> None:
        """If nobody waits for the step."""
        assert self.in_step is not None
        work, outcome = self.in_step
        if not self.kv.scheduler.wanted(work):
            assert all(w.sequence.job.released or w.sequence.job.batch for w in work)
            self.kv.give_up(work)
            self.in_step = None
            self.take(outcome)

    @precondition(lambda self: self.draws is not None)
    @rule()
    def end_step(self) -> None:
        assert self.in_step is not None
        assert self.draws is not None
        work, outcome = self.in_step
        self.kv.scheduler.apply(work, self.draws, self.kv.draw(self.draws), outcome)
        self.in_step = self.draws = None
        self.take(outcome)

    def take(self, outcome: Outcome) -> None:
        for event in outcome.tokens:
            if event.error is not None:
                assert event.error is Reason.NO_CAPACITY, event.message
                assert self.late, "the pool is large enough for any one request"
                self.failed.add(event.uid)
                continue
            request = next(j.request for j in self.jobs if j.request.uid == event.uid)
            output = self.outputs.setdefault((event.uid, event.choice), list(request.emitted_ids))
            assert event.offset == len(output)
            assert (event.uid, event.choice) not in self.ended
            output += event.token_ids
            if event.finish is not None:
                self.ended[event.uid, event.choice] = event.finish
                self.said = [*request.prompt_ids, *output]
        for job, done in outcome.prefilled:
            assert job.request.uid not in self.prefilled
            self.prefilled.add(job.request.uid)
            if job.released:
                continue
            assert [(f.choice, f.token_id) for f in done.first] == [
                (c, next_token(job.prompt, c)) for c in job.request.choices
            ]
            self.kv.check(job.primary.slots, job.prompt, len(job.prompt))
            blocks = -(-len(job.prompt) // BLOCK)
            assert all(self.kv.pool.slot(s).tokens for s in job.primary.slots[:blocks]), "all sealed"
        for job in outcome.embedded:
            assert job not in self.gone
            assert job.hidden_sum == sum(job.prompt), "each position once"
        self.embedded += outcome.embedded
        assert not outcome.failed

    @invariant()
    def the_lane_can_give_back(self) -> None:
        """All but a quarter of the pool, or what one request has; those that lost an input make it again."""
        if hasattr(self, "kv"):
            scheduler = self.kv.scheduler
            self.gone.update(scheduler.take_dropped())
            firm = [job for job in self.jobs if job.batch and any(not scheduler._gives(s) for s in job.sequences)]
            assert len(firm) <= 1 or scheduler._firm() <= scheduler._kept
            assert scheduler.batch_blocks <= scheduler.pinned

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "kv"):
            return
        for blocks in self.held.values():
            assert all(self.kv.pool.slot(slot).key == key and self.kv.pool.slot(slot).tokens for slot, key in blocks)
        found = self.kv.scheduler.check_integrity()
        findings = [f for f in found if not f.startswith("request") and "held for a reader" not in f]
        assert findings == []
        scheduler = self.kv.scheduler
        assert scheduler.running - scheduler.batch[0] <= LIMITS.max_streams
        ages = [sequence.job.order for sequence in scheduler._waiting]
        assert ages == sorted(ages)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        if self.in_step is not None:
            if self.draws is None:
                self.compute()
            self.end_step()
        for number in self.held:
            self.kv.scheduler.holds.drop(number)
        for slot in self.late:
            self.kv.pool.settle(slot)
        self.late = []
        for job in self.jobs:  # nobody will come back for these
            if job.phase in (Phase.RESERVED, Phase.PREFILL) and not job.released:
                self.kv.scheduler.release(job)
        for _ in range(2000):
            if not self.kv.scheduler.has_work():
                break
            self.begin_step()
            if self.in_step[0]:
                assert self.kv.scheduler.wanted(self.in_step[0]), "nobody has come since"
            self.compute()
            self.end_step()
        assert not self.kv.scheduler.has_work(), "stuck"
        for (uid, choice), finish in self.ended.items():
            request = next(j.request for j in self.jobs if j.request.uid == uid)
            assert (self.outputs[uid, choice], finish) == expected(request, choice, LIMITS)
        for job in self.generating:
            if job not in self.gone and job.request.uid not in self.failed:
                assert {(job.request.uid, c) for c in job.request.choices} <= set(self.ended), "a choice never ended"
        self.gone.update(self.kv.scheduler.take_dropped())
        assert sorted(j.id for j in self.embedded) == sorted(j.id for j in self.embedding if j not in self.gone)
        assert self.kv.scheduler.check_integrity() == []
        assert self.kv.pool.available == SLOTS


SchedulerMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
TestScheduler = SchedulerMachine.TestCase
