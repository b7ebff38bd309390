"""A model whose KV can be read: what lies in a slot names the tokens that it was computed from.

It runs a scheduler without torch. Every step checks that the context of each new token is really in the slots that the
scheduler says, and that nothing is written where somebody else may read.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence

from baton.engine.admission import Limits
from baton.engine.port import FinishReason, Request
from baton.engine.torch.scheduler import Scheduler
from baton.engine.torch.sequence import Job, Phase
from baton.engine.torch.step import Draw, Drawn, Outcome, Work
from baton.kv.keys import block_keys, chain
from baton.kv.pool import BlockPool

BLOCK = 4
VOCAB = 30
EOS = 0
GARBAGE = b"garbage"


def context(tokens: Sequence[int]) -> bytes:
    """The KV of the last of `tokens`: it depends on all of them."""
    return hashlib.blake2b(bytes(tokens), digest_size=8).digest()


def next_token(tokens: Sequence[int], choice: int) -> int:
    """The model: a token for each context and choice; an end now and then."""
    digest = hashlib.blake2b(context(tokens) + bytes([choice]), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected(request: Request, choice: int, limits: Limits) -> tuple[list[int], FinishReason]:
    """What a request must give, emitted tokens included."""
    tokens = [*request.prompt_ids, *request.emitted_ids]
    output = list(request.emitted_ids)
    while True:
        token = next_token(tokens, choice)
        if token == EOS and not request.sampling.ignore_eos:
            return output, FinishReason.STOP
        output.append(token)
        tokens.append(token)
        if len(output) >= request.sampling.max_tokens or len(tokens) >= limits.max_context:
            return output, FinishReason.LENGTH


def names(request: Request) -> tuple[list[bytes], bytes]:
    """Keys of the full blocks, and of the tail."""
    tokens = [*request.prompt_ids, *request.emitted_ids]
    keys = block_keys(request.key_root, tokens, BLOCK)
    tail = len(tokens) % BLOCK
    return keys, chain(keys[-1] if keys else request.key_root, tokens[-tail:]) if tail else b""


class FakeKv:
    """Slots of memory, and the scheduler that manages them."""

    def __init__(self, slots: int, limits: Limits) -> None:
        self.memory: list[list[bytes]] = [[GARBAGE] * BLOCK for _ in range(slots)]
        self.pool = BlockPool(slots)
        self.limits = limits
        self.scheduler = Scheduler(self.pool, limits, self._copy, self._zero_tail, self._checksum)
        self._next_id = 0

    def _copy(self, source: int, destination: int) -> None:
        self._check_writable(destination)
        self.memory[destination] = list(self.memory[source])

    def _zero_tail(self, slot: int, tokens: int) -> None:
        self._check_writable(slot)
        self.memory[slot][tokens:] = [b""] * (BLOCK - tokens)

    def _checksum(self, slot: int) -> int:
        return hash((self.pool.slot(slot).generation, *self.memory[slot]))

    def _check_writable(self, slot: int) -> None:
        record = self.pool.slot(slot)
        assert record.tokens == 0, f"slot {slot} is sealed"
        assert record.refs == 1, f"slot {slot} has {record.refs} holders"
        assert not record.quarantined, f"slot {slot} waits for a late read"

    def reserve(self, request: Request, decode_room: bool = True) -> Job:
        """With the keys that a host would send."""
        self._next_id += 1
        return self.scheduler.reserve(self._next_id, request, *names(request), decode_room)

    def embed(self, ids: Sequence[int], *, batch: bool = False) -> Job:
        """As a host would send it."""
        self._next_id += 1
        self.scheduler.embed(self._next_id, list(ids), time.time() + 1e6, batch=batch)
        job = self.scheduler.job(self._next_id)
        assert job is not None
        return job

    def load(self, job: Job, tokens: int) -> None:
        """A verified read: bytes into the job's own slots, then the commit."""
        for position in range(job.primary.computed, tokens):
            slot = job.primary.slots[position // BLOCK]
            self._check_writable(slot)
            self.memory[slot][position % BLOCK] = context(job.prompt[: position + 1])
        self.scheduler.commit(job, tokens)

    def check(self, slots: Sequence[int], tokens: Sequence[int], count: int) -> None:
        """The first `count` positions have their KV."""
        for position in range(count):
            found = self.memory[slots[position // BLOCK]][position % BLOCK]
            assert found == context(tokens[: position + 1]), (
                f"position {position} of {list(tokens)} holds something else"
            )

    def forward(self, work: Iterable[Work]) -> None:
        """Read every context, write every new position."""
        for item in work:
            sequence = item.sequence
            assert 0 < item.count <= sequence.remaining
            self.check(sequence.slots, sequence.tokens, sequence.computed)
            for position in range(sequence.computed, sequence.computed + item.count):
                slot = sequence.slots[position // BLOCK]
                self._check_writable(slot)
                self.memory[slot][position % BLOCK] = context(sequence.tokens[: position + 1])
            if sequence.job.phase is Phase.EMBED:
                # As if a token's hidden state were its id: what is summed twice or left out shows.
                part = sum(sequence.tokens[sequence.computed : sequence.computed + item.count])
                sequence.job.hidden_sum = (sequence.job.hidden_sum or 0) + part  # type: ignore[assignment]

    def give_up(self, work: Iterable[Work]) -> None:
        """A pass that ended between two layers: what it wrote is good for nobody."""
        for item in work:
            sequence = item.sequence
            for position in range(sequence.computed, sequence.computed + item.count):
                slot = sequence.slots[position // BLOCK]
                self._check_writable(slot)
                self.memory[slot][position % BLOCK] = GARBAGE
        self.scheduler.give_up()

    def draw(self, draws: Iterable[Draw]) -> list[Drawn]:
        """What the model says."""
        return [Drawn(next_token([*d.prompt_ids, *d.output_ids], d.choice), None) for d in draws]

    def step(self) -> Outcome:
        """A whole step."""
        outcome = Outcome()
        work = self.scheduler.plan(outcome)
        self.forward(work)
        draws = self.scheduler.computed(work)
        self.scheduler.apply(work, draws, self.draw(draws), outcome)
        return outcome
