"""What of a request's output the connector saves: full blocks, with the KV of the tokens that their keys name."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.vllm.plan import Copy, Planner
from baton.kv.keys import block_keys

SIZE = 4
ROOT = b"r" * 16


class Request:
    """A request as vLLM's scheduler goes on with it, and what its KV cache then holds.

    `tokens` are accepted. With `behind`, a step is scheduled while the last one's token is drawn and not accepted.
    """

    def __init__(self, prompt: int, *, behind: bool = False, seed: int = 0) -> None:
        self.tokens = list(range(prompt))
        self.cache: dict[int, list[int]] = {}
        self.saved: list[tuple[bytes, list[int]]] = []
        self._random = random.Random(seed)
        self._behind = behind
        self._drawn: list[int] = []
        """Not accepted yet."""
        self._computed = 0
        self._blocks: list[int] = []
        self._next_block = 100
        self.planner = Planner(SIZE)
        keys = block_keys(ROOT, self.tokens, SIZE)
        slots = list(range(len(keys)))
        self.params = {"baton_job": 1, "slots": slots, "ready": len(slots), "saves": False}
        self.params["parent"] = keys[-1] if keys else ROOT
        self._start()

    def _start(self) -> None:
        self.planner.matched("r", self.params, 0, self.tokens)
        self._anew = True

    def step(self, tokens: int = 1) -> list[Copy]:
        """Compute that many tokens (of those that are there), and draw the next one after the last."""
        known = [*self.tokens, *self._drawn]
        count = min(tokens, len(known) - self._computed)
        first = len(self._blocks)
        while len(self._blocks) * SIZE < self._computed + count:
            self._blocks.append(self._next_block)
            self._next_block += 1
        blocks = self._blocks if self._anew else self._blocks[first:]
        self.planner.scheduled("r", self._computed, blocks, anew=self._anew)
        self._anew = False
        self.planner.computes("r", count)
        saves = self.planner.take().saves
        for at in range(self._computed, self._computed + count):
            self.cache.setdefault(self._blocks[at // SIZE], [-1] * SIZE)[at % SIZE] = known[at]
        self._computed += count
        self.saved += [(copy.key, list(self.cache[copy.blocks[0]])) for copy in saves]
        self.accept()  # of the step before
        if self._computed == len(self.tokens):
            self._drawn.append(self._random.randrange(1000, 9999))
        if not self._behind:
            self.accept()
        return saves

    def accept(self) -> None:
        self.tokens += self._drawn
        self._drawn.clear()

    def preempt(self, *, drop: bool) -> None:
        """Everything is computed again. With `drop`, what was drawn and not accepted is drawn anew."""
        if drop:
            self._drawn.clear()
        self.accept()
        self._computed, self._blocks = 0, []
        self._start()


def test_each_full_block_goes_to_the_spare_slot_once_it_is_there() -> None:
    request = Request(prompt=6)
    request.planner.spare(1, 50)
    assert request.step(6) == []
    assert len(request.tokens) == 7
    assert request.step() == [], "seven tokens have KV"
    (copy,) = request.step()
    assert (copy.first, copy.slots, copy.blocks) == (1, [50], [101])
    assert request.saved == [(block_keys(ROOT, request.tokens, SIZE)[1], request.tokens[4:8])]
    for _ in range(9):
        assert request.step() == [], "there is no other slot"
    request.planner.spare(1, 51)
    (copy,) = request.step()
    assert (copy.first, copy.slots) == (2, [51]), "it has waited"
    request.planner.spare(1, 52)
    (copy,) = request.step()
    assert (copy.first, copy.slots) == (3, [52])


def test_a_block_waits_until_its_last_token_is_accepted() -> None:
    """Its KV is computed a step before the token is told."""
    request = Request(prompt=3, behind=True)
    request.planner.spare(1, 50)
    request.step(3)
    assert len(request.tokens) == 3
    assert request.step() == []
    assert len(request.tokens) == 4
    (copy,) = request.step()
    assert copy.key == block_keys(ROOT, request.tokens, SIZE)[0]


def test_without_a_slot_nothing_is_saved_and_after_the_end_no_slot_is_taken() -> None:
    request = Request(prompt=6)
    for tokens in (6, 1, 1, 1, 1, 1, 1):
        assert request.step(tokens) == []
    request.planner.finished("r", request.params)
    request.planner.spare(1, 50)
    assert request.planner.take().saves == []


ACTS = ["step"] * 10 + ["chunk"] * 4 + ["spare"] * 4 + ["preempt", "drop"]


@given(
    prompt=st.integers(1, 10),
    behind=st.booleans(),
    acts=st.lists(st.sampled_from(ACTS), min_size=20, max_size=60),
    seed=st.integers(0, 3),
)
def test_what_is_saved_is_the_kv_of_what_its_key_names(prompt: int, behind: bool, acts: list[str], seed: int) -> None:
    """Whatever is preempted, drawn anew, computed in chunks, or waits for a slot; and no block twice, none left out."""
    request = Request(prompt, behind=behind, seed=seed)
    slots = 0
    for act in acts:
        if act == "spare" and len(request.saved) == slots:
            slots += 1
            request.planner.spare(1, 50 + slots)
        elif act in ("preempt", "drop"):
            request.preempt(drop=act == "drop")
        else:
            request.step(16 if act == "chunk" else 1)
    keys = block_keys(ROOT, request.tokens, SIZE)
    blocks = [request.tokens[i * SIZE : (i + 1) * SIZE] for i in range(len(keys))]
    first = prompt // SIZE
    assert request.saved == list(zip(keys, blocks, strict=True))[first : first + len(request.saved)]
