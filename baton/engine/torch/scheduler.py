"""Continuous batching: what each step computes, and what follows from it.

A step mixes one token of every running sequence (at most `max_streams`) with chunks of prompts, oldest first, up to
`chunk_tokens`, of which a quarter is for prompts that fit into it: a short one never waits for a long one. When the
pool runs out in mid-decode the youngest sequence gives its blocks up and is computed again later; its tokens are kept,
and no new request gets the blocks that it waits for.

Requests of the batch lane give way to all others: they are refused while others wait, join a step only as far as these
do not feel it (`lane.py`), and are the first to lose their place and their blocks. A step of theirs alone is given up
when somebody else comes (`wanted`), as any step is whose requests were all cancelled.

Inputs that are embedded come after prompts and take what these leave of a chunk, a quarter of it at least: nobody's
stream gets slower than beside a prompt, and no prompt waits behind them.

Every method is called under the engine's lock, except that the forward pass between `plan` and `apply` runs without
it: jobs released meanwhile keep their blocks until `apply`.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, abc

from baton.engine.admission import Limits, validate, validate_input
from baton.engine.chunk import ChunkBudget
from baton.engine.port import FinishReason, FirstToken, PrefillDone, Request, SamplingParams, TokenEvent
from baton.engine.predict import StepCost
from baton.engine.torch.batch import Logits
from baton.engine.torch.grammars import Grammars
from baton.engine.torch.lane import Costs, allowed, kept
from baton.engine.torch.sequence import Job, Phase, Sequence
from baton.engine.torch.step import Draw, Drawn, Outcome, Work
from baton.errors import BatonError, Reason
from baton.kv.holds import Holds
from baton.kv.keys import chain
from baton.kv.pool import BlockPool, PoolFull

EMBED_SHARE = 4
"""Of a step's prompt tokens, one in so many is for embeddings when there are any."""


class Scheduler:
    """Jobs, their sequences, the pool. `copy_slot(src, dst)`, `zero_tail(slot, tokens)` and `checksum(slot)` (over a
    sealed slot's identity and bytes) touch the bytes. `grammars`: where `limits` let any in; `cost`: of steps."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        copy_slot: abc.Callable[[int, int], None],
        zero_tail: abc.Callable[[int, int], None],
        checksum: abc.Callable[[int], int],
        grammars: Grammars | None = None,
        cost: StepCost | None = None,
    ) -> None:
        self.pool = pool
        self.holds = Holds(pool)
        self.limits = limits
        self._copy_slot = copy_slot
        self._zero_tail = zero_tail
        self._checksum = checksum
        self._grammars = grammars
        self._cost = cost or StepCost()
        self._kept = kept(len(pool))
        self._jobs: dict[int, Job] = {}
        self._live: set[tuple[str, int]] = set()
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._embedding: list[Sequence] = []
        self._in_step: set[Job] = set()
        self._order = 0
        self._urgent = False
        self._batch_paused_until = 0.0
        self._dropped: list[Job] = []
        self.preemptions = 0
        self.batch_preemptions = 0
        self.given_up_steps = 0
        self.corrupted_blocks = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.prefill_tokens_computed = 0
        self.output_tokens = 0

    # ---- reservations

    def job(self, id: int) -> Job | None:
        """The live job of that number, if it is."""
        job = self._jobs.get(id)
        return None if job is None or job.released else job

    @property
    def stepping(self) -> bool:
        """Whether a step is between `plan` and the end of `apply`."""
        return bool(self._in_step)

    def wanted(self, work: list[Work]) -> bool:
        """Whether anybody waits for the step under way: not when all its requests are gone, nor, if they are the batch
        lane's, when others have come since. Needs no lock."""
        return any(not w.sequence.job.released and not (self._urgent and w.sequence.job.batch) for w in work)

    @property
    def running(self) -> int:
        """Sequences that generate."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences whose prompt is not computed yet."""
        return len(self._waiting) + len(self._embedding)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed."""
        return sum(s.remaining for s in (*self._waiting, *self._embedding))

    @property
    def queued_short_tokens(self) -> int:
        """Of these, those of prompts that overtake longer ones."""
        waiting = (s.remaining for s in self._waiting if not s.job.batch)
        return sum(remaining for remaining in waiting if remaining <= self.limits.short_tokens)

    @property
    def batch(self) -> tuple[int, int, int]:
        """Of the batch lane: sequences that generate, those that wait, and prompt tokens of these."""
        waiting = [s for s in (*self._waiting, *self._embedding) if s.job.batch]
        return sum(s.job.batch for s in self._running), len(waiting), sum(s.remaining for s in waiting)

    @property
    def batch_blocks(self) -> int:
        """Blocks that only the batch lane holds and gives back when others want them."""
        giving = (s for s in (*self._running, *self._waiting, *self._embedding) if s.job.batch and self._gives(s))
        return len({slot for s in giving for slot in s.slots if self.pool.slot(slot).refs == 1})

    @property
    def batch_in_step(self) -> bool:
        """Whether the step under way has something of the batch lane, whose blocks are not to be had before its end."""
        return any(job.batch for job in self._in_step)

    def take_dropped(self) -> list[Job]:
        """Embeddings of the batch lane that lost their blocks since this was asked last, and are forgotten."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def pinned(self) -> int:
        """Slots that somebody holds."""
        return len(self.pool) - self.pool.available - self.pool.quarantined

    def reserve(self, id: int, request: Request, keys: list[bytes], tail_key: bytes, decode_room: bool) -> Job:
        """Pin prefix hits and take the rest, all or nothing. Raises BatonError (see `Engine.reserve`)."""
        prompt = [*request.prompt_ids, *request.emitted_ids]
        validate(request, prompt, self.limits)
        if (request.uid, request.attempt) in self._live:
            raise BatonError(Reason.DUPLICATE_REQUEST, f"{request.uid}/{request.attempt} is already here", param="uid")
        self._admit(request)
        size = self.limits.block_size
        hits: list[int] = []
        if request.sampling.prompt_logprobs is None:
            hits = self._sound(self.pool.match(keys[: (len(prompt) - 1) // size]))
        self.pool.hold(hits)
        needed = self._blocks(len(prompt)) - len(hits) + decode_room
        try:
            fresh = self._take(request, needed)
        except PoolFull as full:
            self.pool.drop(reversed(hits))
            raise BatonError(Reason.NO_CAPACITY, str(full)) from full
        self._order += 1
        job = Job(id, request, self._order, prompt, hit_tokens=len(hits) * size)
        if request.sampling.grammar is not None and self._grammars is not None:
            job.grammar = self._grammars.get(request.sampling.grammar)
        job.primary = Sequence(
            job, request.choices[0], list(prompt), hits + fresh, job.hit_tokens, len(hits), [*keys], forks=True
        )
        job.primary.keys.append(tail_key)
        job.sequences = [job.primary]
        self._jobs[id] = job
        self._live.add((request.uid, request.attempt))
        self.prompt_tokens += len(prompt)
        self.cached_prompt_tokens += job.hit_tokens
        return job

    def _admit(self, request: Request) -> None:
        """Raises BatonError(NO_CAPACITY) when too many are here already; of the batch lane also while others wait."""
        alike = sum(job.batch == request.batch for job in self._jobs.values())
        if alike >= (self.limits.max_streams if request.batch else self.limits.max_jobs):
            raise BatonError(Reason.NO_CAPACITY, f"{alike} requests are here already")
        if request.batch and not all(s.job.batch for s in (*self._waiting, *self._embedding)):
            raise BatonError(Reason.NO_CAPACITY, "others wait: nothing of the batch lane is taken")

    def _take(self, request: Request, needed: int) -> list[int]:
        """So many blocks for a request that comes in. Raises PoolFull."""
        # Who was preempted is older: it must not wait for ever because the young take every block that is freed.
        owed = self._owed(batch=request.batch)
        if not request.batch:
            self._shed(needed + owed)
        if owed and needed + owed > self.pool.available:
            raise PoolFull(f"{needed} blocks wanted, and {owed} of {self.pool.available} are promised")
        if request.batch and self._jobs and needed + self._kept > self.pool.available:
            raise PoolFull(f"{needed} blocks wanted for the batch lane, which leaves {self._kept} to others")
        firm = self._firm() if request.batch else 0
        if firm and firm + needed > self._kept:
            raise PoolFull(f"{firm} blocks are what the batch lane cannot give back; {needed} more are too many")
        return self.pool.take(needed)

    def _firm(self) -> int:
        """Blocks of the batch lane that somebody reads or writes from outside: it cannot give them back."""
        return sum(
            len(s.slots) for job in self._jobs.values() if job.batch for s in job.sequences if not self._gives(s)
        )

    def _owed(self, *, batch: bool) -> int:
        """Blocks that waiting sequences lack; those of the batch lane have no claim before others."""
        waiting = (s for s in self._waiting if batch or not s.job.batch)
        return sum(max(0, self._blocks(len(s.tokens)) - len(s.slots)) for s in waiting)

    def commit(self, job: Job, tokens: int) -> None:
        """The first `tokens` of the prompt have verified KV: full blocks become prefix hits for others."""
        primary = job.primary
        if job.phase is not Phase.RESERVED or tokens > len(job.prompt):
            return
        primary.computed = max(primary.computed, tokens)
        self._seal_full(primary)

    def swap(self, job: Job, blocks: list[int]) -> list[int]:
        """Quarantine the slots of prompt blocks that a late read may still write; the prompt's slots after it.

        Fewer than before when the pool has no replacement: what is left is a prefix, and the rest is taken again, as
        after a preemption, when the prompt is computed.
        """
        slots = job.primary.slots
        for block in blocks:
            self.pool.quarantine(slots[block])
        try:
            fresh = self.pool.take(len(blocks))
        except PoolFull:
            kept = min(blocks)
            self.pool.drop(slot for i, slot in enumerate(slots) if i > kept and i not in set(blocks))
            del slots[kept:]
        else:
            for block, slot in zip(blocks, fresh, strict=True):
                slots[block] = slot
        return slots[: self._blocks(len(job.prompt))]

    def release(self, job: Job) -> None:
        """Give everything back; a job inside the running step does so when the step ends."""
        job.released = True
        if job not in self._in_step:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        job.phase = Phase.ENDED
        job.released = True
        for sequence in job.sequences:
            self._leave(sequence)
        job.sequences = []
        if self._jobs.pop(job.id, None) is not None:
            self._live.discard((job.request.uid, job.request.attempt))

    def _leave(self, sequence: Sequence) -> None:
        for line in (self._running, self._waiting, self._embedding):
            if sequence in line:
                line.remove(sequence)
        # Last block first: a prefix is evicted from its end, so what stays can still be matched.
        self.pool.drop(reversed(sequence.slots))
        sequence.slots = []

    # ---- starting work

    def prefill(self, job: Job) -> None:
        """Compute the prompt for a peer."""
        if job.phase is not Phase.RESERVED:
            return
        job.phase = Phase.PREFILL
        self._ready_prompt(job)

    def stop_prefill(self, job: Job) -> None:
        """Compute no further; blocks stay held."""
        if job.phase is Phase.PREFILL and job.primary in self._waiting:
            self._waiting.remove(job.primary)

    def generate(self, job: Job, first: list[tuple[int, int]], done: list[int]) -> None:
        """Start the choices, with first tokens that were drawn elsewhere when there are any."""
        if job.phase not in (Phase.RESERVED, Phase.PREFILL):
            return
        self.stop_prefill(job)
        job.phase = Phase.GENERATE
        job.first = dict(first)
        for choice in done:
            job.finished[choice] = FinishReason.STOP
        if len(job.finished) == len(job.request.choices):
            self.release(job)  # a step may be writing into its blocks
        elif job.first and job.primary.computed == len(job.prompt):
            self._fork(job)
        else:
            self._ready_prompt(job)

    def _ready_prompt(self, job: Job) -> None:
        primary = job.primary
        if primary.computed == len(job.prompt) and not job.first:
            self._reopen_last(primary)
        self._wait(primary)

    def _wait(self, sequence: Sequence) -> None:
        """Into the line, which is by age."""
        self._urgent |= not sequence.job.batch
        insort(self._waiting, sequence, key=lambda s: s.job.order)

    def _reopen_last(self, primary: Sequence) -> None:
        """Its last token must be computed again, for its logits: into a block of our own, for sealed ones stay."""
        primary.computed -= 1
        last = primary.computed // self.limits.block_size
        if self.pool.slot(primary.slots[last]).tokens:
            primary.sealed = last
            self._own_copy(primary, last)

    def hurry(self) -> None:
        """Somebody who is not of the batch lane waits for the end of the step under way."""
        self._urgent = True

    def grammar_done(self) -> None:
        """One is compiled: who waits for it can go on."""
        self._urgent |= any(not s.job.batch for s in (*self._running, *self._waiting))

    def pause_batch(self, seconds: float) -> None:
        """See `Engine.pause_batch`."""
        self._batch_paused_until = max(self._batch_paused_until, time.monotonic() + seconds)
        self.hurry()

    # ---- steps

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting or self._embedding)

    def plan(self, outcome: Outcome) -> list[Work]:
        """The next step. Requests past their deadline, or that cannot go on, are told in `outcome`."""
        self._expire(outcome)
        self._refuse_grammars(outcome)
        self._clear_the_way()
        decodable = self._decodable(outcome)
        work = [Work(s, 1, "last") for s in decodable if not s.job.batch]
        chunk = self.limits.chunk_tokens
        embeds = any(not s.job.batch for s in self._embedding)
        prompts = self._prompts(chunk - chunk // EMBED_SHARE if embeds else chunk, batch=False)
        work += prompts + self._embeddings(chunk - sum(w.count for w in prompts), batch=False)
        work += self._lane(work, [s for s in decodable if s.job.batch and s in self._running], chunk)
        self._in_step = {w.sequence.job for w in work}
        self._urgent = False
        return work

    def _lane(self, others: list[Work], streams: list[Sequence], chunk: int) -> list[Work]:
        """What of the batch lane the step takes in beside `others`."""
        if not streams and not any(s.job.batch for s in (*self._waiting, *self._embedding)):
            return []
        if time.monotonic() < self._batch_paused_until:
            return []
        decoding = sum(w.count == 1 for w in others)
        step_s = self._cost.predict(sum(w.count for w in others) - decoding, decoding) or 1e-9 if others else 0.0
        room = self.limits.max_streams - decoding
        may = allowed(step_s, room, chunk, Costs(self._cost.stream_s, self._cost.prefill_tok_s))
        work = [Work(s, 1, "last") for s in streams[: may.streams]]
        left = min(chunk - sum(w.count for w in others if w.count > 1), may.prompt_tokens)
        prompts = self._prompts(left, batch=True)
        return work + prompts + self._embeddings(left - sum(w.count for w in prompts), batch=True)

    def _prompts(self, tokens: int, *, batch: bool) -> list[Work]:
        """Chunks of waiting prompts, oldest first; long ones leave room for short ones behind them."""
        work: list[Work] = []
        slots = self._room(batch=batch)
        blocked = False
        line = [s for s in self._waiting if s.job.batch == batch and not s.job.waits_for_grammar]
        short = self.limits.short_tokens
        behind = sum(s.remaining for s in line if s.remaining <= short and self._ready(s, slots))
        budget = ChunkBudget(tokens, short, behind)
        for sequence in line:
            most = budget.most(sequence.remaining)
            if most <= 0 or (slots <= 0 and sequence.job.phase is Phase.GENERATE):
                continue
            # One that waits for blocks is overtaken only by those that hold theirs, and will give them back.
            blocked = blocked or not self._has_blocks(sequence)
            if len(sequence.slots) < self._blocks(len(sequence.tokens)):
                continue
            count = min(most, sequence.remaining)
            budget.take(sequence.remaining, count)
            slots -= sequence.job.phase is Phase.GENERATE
            work.append(Work(sequence, count, self._logits(sequence, count)))
        for place, item in enumerate(work):  # what the short ones could not take after all
            more = min(budget.left, item.sequence.remaining - item.count)
            if more > 0:
                budget.left -= more
                count = item.count + more
                work[place] = Work(item.sequence, count, self._logits(item.sequence, count))
        return work

    def _ready(self, sequence: Sequence, slots: int) -> bool:
        """Whether a step may take it: it holds its blocks, and there is a place for it when it is to stream."""
        holds = len(sequence.slots) >= self._blocks(len(sequence.tokens))
        return holds and (slots > 0 or sequence.job.phase is not Phase.GENERATE)

    def _room(self, *, batch: bool) -> int:
        """How many sequences may join those that run; to others, those of the batch lane take no place."""
        return self.limits.max_streams - sum(batch or not s.job.batch for s in self._running)

    # ---- who gives way

    def _clear_the_way(self) -> None:
        """Before a step: the batch lane leaves places and blocks to others; alone, one of it may have all of them."""
        while len(self._running) > self.limits.max_streams and self._give_way():
            pass
        alone = all(job.batch for job in self._jobs.values())
        while self.pool.available < self._kept and (victims := self._victims()) and not (alone and len(victims) == 1):
            self._lose(victims[-1])

    def _shed(self, blocks: int) -> None:
        """Take blocks from the batch lane until `blocks` are to be had, or it has no more to give."""
        while self.pool.available < blocks and self._give_way():
            pass

    def _give_way(self) -> bool:
        """The youngest of the batch lane loses its place and its blocks; False when there is none that can."""
        victims = self._victims()
        if victims:
            self._lose(victims[-1])
        return bool(victims)

    def _lose(self, victim: Sequence) -> None:
        """It goes on later; an input that is embedded is made again, by whoever asked for it."""
        if victim.job.phase is Phase.EMBED:
            self.batch_preemptions += 1
            self._dropped.append(victim.job)
            self._forget(victim.job)
        else:
            self._preempt(victim)

    def _victims(self) -> list[Sequence]:
        """Sequences of the batch lane that can give their blocks up now, oldest first: not in mid-step."""
        lines = (*self._running, *self._waiting, *self._embedding)
        found = (s for s in lines if s.job.batch and s.slots and s.job not in self._in_step)
        return sorted((s for s in found if self._gives(s)), key=lambda s: s.job.order)

    @staticmethod
    def _gives(sequence: Sequence) -> bool:
        """Whether it can give its blocks up: not a prompt that a peer reads or that is being loaded, nor one whose log
        probabilities are half told."""
        job = sequence.job
        told = sequence.forks and job.wants_prompt_logprobs
        return job.phase is Phase.EMBED or (job.phase is Phase.GENERATE and not told)

    def _logits(self, sequence: Sequence, count: int) -> Logits:
        job = sequence.job
        if sequence.forks and job.wants_prompt_logprobs and not job.first:
            return "all"
        if count < sequence.remaining or (sequence.forks and job.first):
            return "none"
        return "last"

    def _expire(self, outcome: Outcome) -> None:
        now = time.time()
        lines = (self._running, self._waiting, self._embedding)
        late = {s.job for line in lines for s in line if s.job.request.deadline < now}
        for job in late:
            self._fail(job, Reason.DEADLINE_EXCEEDED, "the request's deadline has passed", outcome)

    def _refuse_grammars(self, outcome: Outcome) -> None:
        jobs = {s.job for line in (self._running, self._waiting) for s in line if s.job.waits_for_grammar}
        for job in jobs:
            if job.grammar is not None and job.grammar.error:
                self._fail(job, Reason.INVALID_REQUEST, f"the grammar cannot be used: {job.grammar.error}", outcome)

    def _fail(self, job: Job, reason: Reason, message: str, outcome: Outcome) -> None:
        if job.phase is Phase.PREFILL:
            outcome.failed.append((job, reason, message))
            self.stop_prefill(job)
            return
        if job.phase is Phase.EMBED:
            outcome.failed.append((job, reason, message))
            self._forget(job)
            return
        request = job.request
        event = TokenEvent(request.uid, request.attempt, request.choices[0], 0, error=reason, message=message)
        outcome.tokens.append(event)
        self._forget(job)

    def _decodable(self, outcome: Outcome) -> list[Sequence]:
        """Running sequences with room for their next token; others give way, youngest first, until there is."""
        for sequence in sorted(self._running, key=lambda s: (s.job.batch, s.job.order)):
            while sequence in self._running and not self._grow(sequence):
                if not sequence.job.batch and self._give_way():
                    continue
                victim = max(self._running, key=lambda s: (s.job.batch, s.job.order))
                if victim is sequence and len(self._running) == 1 and not self._others_hold(sequence):
                    self._fail(sequence.job, Reason.NO_CAPACITY, "the KV pool is smaller than this request", outcome)
                else:
                    self._preempt(victim)
        return [sequence for sequence in self._running if not sequence.job.waits_for_grammar]

    def _others_hold(self, sequence: Sequence) -> bool:
        return self.pinned > len(set(sequence.slots))

    def _others_wait_or_run(self, sequence: Sequence) -> bool:
        return any(s.slots for s in (*self._running, *self._waiting) if s is not sequence)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _grow(self, sequence: Sequence) -> bool:
        needed = self._blocks(len(sequence.tokens))
        if needed <= len(sequence.slots):
            return True
        try:
            sequence.slots += self.pool.take(needed - len(sequence.slots))
        except PoolFull:
            return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
            self._wait(sequence)
        self.pool.drop(reversed(sequence.slots))
        sequence.slots, sequence.computed, sequence.sealed = [], 0, 0
        self.preemptions += 1
        self.batch_preemptions += sequence.job.batch

    def _has_blocks(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens: held since the reservation, or taken again after a preemption."""
        batch = sequence.job.batch
        if sequence.slots:
            if not batch:
                self._shed(self._blocks(len(sequence.tokens)) - len(sequence.slots))
            return self._grow(sequence)
        size = self.limits.block_size
        known = min(len(sequence.keys), (len(sequence.tokens) - 1) // size)
        hits = self._sound(self.pool.match(sequence.keys[:known]))
        self.pool.hold(hits)
        needed = self._blocks(len(sequence.tokens)) - len(hits)
        if not batch:
            self._shed(needed)
        try:
            if batch and self._others_wait_or_run(sequence) and needed + self._kept > self.pool.available:
                raise PoolFull(f"the batch lane leaves {self._kept} blocks to others")
            fresh = self.pool.take(needed)
        except PoolFull:
            self.pool.drop(reversed(hits))
            return False
        sequence.slots = hits + fresh
        sequence.computed, sequence.sealed = len(hits) * size, len(hits)
        return True

    def computed(self, work: list[Work]) -> list[Draw]:
        """The forward pass is over: count it, seal full blocks, and say what to draw, in the order of `work`."""
        draws: list[Draw] = []
        for item in work:
            sequence, job = item.sequence, item.sequence.job
            sequence.computed += item.count
            if sequence in self._waiting or job.phase is Phase.EMBED:
                self.prefill_tokens_computed += item.count
            if job.released or job.phase is Phase.EMBED:
                continue
            self._seal_full(sequence)
            if sequence.remaining or (sequence.forks and job.first):
                continue
            request = job.request
            choices = request.choices if sequence.forks else (sequence.choice,)
            output = sequence.tokens[len(request.prompt_ids) :]
            if job.grammar is not None and sequence.follower is None:
                sequence.follower = job.grammar.follower()
            follower = sequence.follower
            draws += [Draw(sequence, c, request.sampling, request.prompt_ids, output, follower) for c in choices]
        return draws

    def apply(self, work: list[Work], draws: list[Draw], drawn: list[Drawn], outcome: Outcome) -> None:
        """Take the drawn tokens in and free what was released during the step."""
        by_sequence: dict[Sequence, list[tuple[int, Drawn]]] = {}
        for draw, token in zip(draws, drawn, strict=True):
            by_sequence.setdefault(draw.sequence, []).append((draw.choice, token))
        for item in work:
            sequence, job = item.sequence, item.sequence.job
            if job.released or sequence not in job.sequences:
                continue
            if job.phase is Phase.PREFILL:
                outcome.announce.append(job)
            if sequence.remaining:
                continue
            if job.phase is Phase.EMBED:
                outcome.embedded.append(job)
                self._forget(job)
                continue
            tokens = by_sequence.get(sequence, [])
            failure = next((token.failure for _, token in tokens if token.failure), "")
            if failure:
                grammar = any(token.grammar for _, token in tokens)
                if job.grammar is not None and self._grammars is not None and grammar:
                    self._grammars.drop(job.grammar)
                self._fail(job, Reason.INVALID_REQUEST if grammar else Reason.INTERNAL, failure, outcome)
            elif not sequence.forks:
                self._continue(sequence, tokens[0][1], outcome)
            elif job.phase is Phase.PREFILL:
                self._end_prefill(job, tokens, outcome)
            elif job.phase is Phase.GENERATE:
                self._start_choices(job, tokens, outcome)
        self._end_step()

    def give_up(self) -> None:
        """The step ends without a result: what it was to compute is planned anew."""
        self.given_up_steps += 1
        self._end_step()

    def _end_step(self) -> None:
        stepped, self._in_step = self._in_step, set()
        for job in stepped:
            if job.released and job.phase is not Phase.ENDED:
                self._forget(job)

    def _seal_full(self, sequence: Sequence) -> None:
        size = self.limits.block_size
        while (sequence.sealed + 1) * size <= sequence.computed:
            i = sequence.sealed
            if len(sequence.keys) <= i or (i * size + size > len(sequence.job.prompt)):
                # Past the prompt's full blocks: the chain goes on over its tail and what was generated.
                parent = sequence.keys[i - 1] if i else sequence.job.request.key_root
                sequence.keys[i:] = [chain(parent, sequence.tokens[i * size : (i + 1) * size])]
            if not self.pool.slot(sequence.slots[i]).tokens:
                self._seal(sequence.slots[i], sequence.keys[i], size, index_it=True)
            sequence.sealed += 1

    def seal_tail(self, job: Job) -> None:
        """Make the prompt's partial last block announceable: private, its tail zeroed."""
        size = self.limits.block_size
        tokens = len(job.prompt) % size
        slot = job.primary.slots[len(job.prompt) // size] if tokens else -1
        if tokens and not self.pool.slot(slot).tokens:
            self._zero_tail(slot, tokens)
            self._seal(slot, job.primary.keys[len(job.prompt) // size], tokens, index_it=False)

    def _seal(self, slot: int, key: bytes, tokens: int, *, index_it: bool) -> None:
        self.pool.seal(slot, key, tokens, index_it=index_it)
        self.pool.set_checksum(slot, self._checksum(slot))

    def _sound(self, hits: list[int]) -> list[int]:
        """The prefix of `hits` whose bytes are still those that were sealed: memory can fail, and a cache lives long.
        What has changed is forgotten and counted."""
        for i, slot in enumerate(hits):
            if self._checksum(slot) != self.pool.slot(slot).checksum:
                self.pool.distrust(slot)
                self.corrupted_blocks += 1
                return hits[:i]
        return hits

    def _end_prefill(self, job: Job, drawn: list[tuple[int, Drawn]], outcome: Outcome) -> None:
        self.stop_prefill(job)
        self.seal_tail(job)
        first = tuple(
            FirstToken(choice, token.token_id, token.logprob, self._finish(job, len(job.prompt) + 1, token.token_id))
            for choice, token in drawn
        )
        self.output_tokens += len(first)
        outcome.prefilled.append((job, PrefillDone(first, job.hit_tokens, tuple(job.prompt_logprobs))))

    def _start_choices(self, job: Job, drawn: list[tuple[int, Drawn]], outcome: Outcome) -> None:
        """The prompt is computed here: fork, with the tokens just drawn or those given."""
        if job.first:
            self._fork(job)
            return
        job.first = {choice: token.token_id for choice, token in drawn}
        for choice, token in drawn:
            self._tell(job, choice, len(job.prompt) + 1, token, outcome)
        self._fork(job)

    def _fork(self, job: Job) -> None:
        """One sequence for each unfinished choice: full blocks shared, the tail copied for all but one.

        Choices over `max_streams` wait, with their blocks, for one that ends.
        """
        primary, size = job.primary, self.limits.block_size
        if primary in self._waiting:
            self._waiting.remove(primary)
        open_choices = [c for c in job.request.choices if c not in job.finished]
        full = len(job.prompt) // size
        tail = len(job.prompt) % size
        if tail and self.pool.slot(primary.slots[full]).tokens:
            self._own_copy(primary, full)  # announced or loaded: decoding appends to a copy
        sequences: list[Sequence] = []
        for number, choice in enumerate(open_choices):
            sequence = Sequence(
                job,
                choice,
                [*job.prompt, job.first[choice]],
                primary.slots if number == 0 else [],
                len(job.prompt) if number == 0 else 0,
                min(primary.sealed, full),
                primary.keys[:full],
            )
            if number:
                self._share(primary, sequence, full, tail)
            sequences.append(sequence)
        job.sequences = sequences
        if not sequences:
            job.sequences = [primary]
            self._forget(job)
            return
        self._urgent |= not job.batch
        for sequence in sequences:
            if sequence.slots and self._room(batch=job.batch) > 0:
                self._running.append(sequence)
            else:
                self._wait(sequence)

    def _own_copy(self, primary: Sequence, block: int) -> None:
        """Replace a sealed block by an open copy. Raises BatonError(NO_CAPACITY) when there is no slot for it."""
        try:
            (fresh,) = self.pool.take(1)
        except PoolFull as full:
            # The decode room taken at the reservation stands behind the prompt.
            if len(primary.slots) <= self._blocks(len(primary.job.prompt)):
                raise BatonError(Reason.NO_CAPACITY, str(full)) from full
            fresh = primary.slots.pop()
        self._copy_slot(primary.slots[block], fresh)
        self.pool.drop([primary.slots[block]])
        primary.slots[block] = fresh

    def _share(self, primary: Sequence, sequence: Sequence, full: int, tail: int) -> None:
        """Without a block for its tail a choice waits, as if preempted, and computes its prompt again."""
        shared = primary.slots[:full]
        fresh: list[int] = []
        if tail:
            try:
                fresh = self.pool.take(1)
            except PoolFull:
                sequence.sealed = 0
                return
            self._copy_slot(primary.slots[full], fresh[0])
        self.pool.hold(shared)
        sequence.slots = shared + fresh
        sequence.computed = len(sequence.job.prompt)

    def _continue(self, sequence: Sequence, token: Drawn, outcome: Outcome) -> None:
        """A drawn token of one choice: tell it, and go on or end."""
        if sequence in self._waiting and self._room(batch=sequence.job.batch) > 0:
            self._waiting.remove(sequence)
            self._running.append(sequence)
        sequence.tokens.append(token.token_id)
        finish = self._tell(sequence.job, sequence.choice, len(sequence.tokens), token, outcome)
        if finish is None:
            return
        self._leave(sequence)
        sequence.job.sequences.remove(sequence)
        if not sequence.job.sequences:
            self._forget(sequence.job)

    def _finish(self, job: Job, length: int, token: int) -> FinishReason | None:
        """Whether a token, the last of `length` prompt and output tokens, ends its choice."""
        params = job.request.sampling
        output = length - len(job.request.prompt_ids)
        eos = token in self.limits.eos_token_ids
        if eos and params.grammar is not None:
            return FinishReason.STOP  # its mask has seen to it that nothing else was to come
        stops = token in params.stop_token_ids or (eos and not params.ignore_eos)
        if stops and output > params.min_tokens:
            return FinishReason.STOP
        # A prefill's peer goes on, in a context of its own.
        full = length >= self.limits.max_context and job.phase is not Phase.PREFILL
        if output >= params.max_tokens or full:
            return FinishReason.LENGTH
        return None

    def _tell(self, job: Job, choice: int, length: int, token: Drawn, outcome: Outcome) -> FinishReason | None:
        """One event; a token that stops its choice is no output."""
        finish = self._finish(job, length, token.token_id)
        ids: tuple[int, ...] = () if finish is FinishReason.STOP else (token.token_id,)
        logprobs = (token.logprob,) if ids and token.logprob else ()
        offset = length - 1 - len(job.request.prompt_ids)
        request = job.request
        outcome.tokens.append(TokenEvent(request.uid, request.attempt, choice, offset, ids, logprobs, finish))
        self.output_tokens += len(ids)
        if finish is not None:
            job.finished[choice] = finish
        return finish

    # ---- embeddings

    def embed(self, id: int, ids: list[int], deadline: float, *, batch: bool = False) -> None:
        """Take an input in; what it comes to is told in a later `Outcome.embedded`, or `failed`.

        Its blocks are its own: nothing is found in the cache, for every position's hidden state is wanted, and nothing
        is kept there. Raises BatonError: NO_CAPACITY, CONTEXT_LENGTH_EXCEEDED, INVALID_REQUEST.
        """
        validate_input(ids, self.limits)
        request = Request(f"embed-{id}", 0, ids, SamplingParams(max_tokens=1, seed=0), b"", deadline, batch=batch)
        self._admit(request)
        try:
            slots = self._take(request, self._blocks(len(ids)))
        except PoolFull as full:
            raise BatonError(Reason.NO_CAPACITY, str(full)) from full
        self._order += 1
        job = Job(id, request, self._order, ids, phase=Phase.EMBED)
        job.primary = Sequence(job, 0, ids, slots, forks=True)
        job.sequences = [job.primary]
        self._jobs[id] = job
        self._urgent |= not job.batch
        self._embedding.append(job.primary)
        self.prompt_tokens += len(ids)

    def _embeddings(self, budget: int, *, batch: bool) -> list[Work]:
        """Chunks of inputs, oldest first."""
        work: list[Work] = []
        for sequence in self._embedding:
            if budget > 0 and sequence.job.batch == batch:
                count = min(budget, sequence.remaining)
                budget -= count
                work.append(Work(sequence, count, "none"))
        return work

    # ---- leak check

    def check_integrity(self) -> list[str]:
        """Findings of the pool, and every reservation that is live; empty when idle and clean."""
        holders = Counter(slot for job in self._jobs.values() for s in job.sequences for slot in s.slots)
        holders.update(self.holds.slots)
        found = self.pool.check_integrity(holders) + self.holds.findings()
        found += [f"request {j.request.uid}/{j.request.attempt} is {j.phase.name.lower()}" for j in self._jobs.values()]
        return found
