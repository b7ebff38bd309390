"""Where one output stands in its grammar: a function of the tokens that are out, and of nothing else.

So an output that moves to another worker, is preempted or forked goes on exactly: its tokens are taken in again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.grammar.compile import Program


class GrammarFailedError(Exception):
    """The grammar cannot be followed any further; the message says why."""


class Follower:
    """One output's state, from its beginning."""

    def __init__(self, program: Program) -> None:
        self._matcher = program.matcher.deep_copy()
        self._vocabulary = program.vocabulary
        self._after = program.grammar.after.encode()
        self._opening = program.vocabulary.token_id(program.grammar.opening)
        self._free = bool(self._after) and not program.grammar.opening
        """Whether the output is in the text that comes before what the grammar says."""
        self._tail = b""
        self._taken = 0

    def allowed(self, output: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may follow `output`, bool [vocab_size]: the ends of text where the grammar may end.

        `output` has what it had at the last call, and what came since. Raises GrammarFailedError.
        """
        self._take(output)
        if self._free:
            allowed = np.ones(vocab_size, np.bool_)
            allowed[self._vocabulary.eos_ids] = False
            return allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarFailedError(f"the grammar is too much to follow: {self._matcher.get_error()}")
        allowed = np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)
        if self._after and not output and self._opening is not None:
            allowed[self._opening] = True
        return allowed

    def _take(self, output: Sequence[int]) -> None:
        if self._after and not self._taken and output:
            self._free = self._free or output[0] == self._opening
        while self._free and self._taken < len(output):
            self._pass(self._vocabulary.token_bytes(output[self._taken]))
            self._taken += 1
        new = list(output[self._taken :])
        self._taken = len(output)
        if new:
            self._follow(new)

    def _pass(self, data: bytes) -> None:
        """A token of the free text. What stands in its end behind the mark is under the grammar, blanks apart."""
        before, mark, behind = (self._tail + data).partition(self._after)
        self._tail = before[-len(self._after) :]
        if mark:
            self._free = False
            if rest := behind.lstrip():
                self._follow(self._vocabulary.built().tokenize_bytes(rest))

    def _follow(self, tokens: list[int]) -> None:
        if not self._matcher.consume_tokens(tokens):
            raise GrammarFailedError(f"the output cannot go on by its grammar: {self._matcher.get_error()}")


def may_follow(
    allowed: NDArray[np.bool_],
    *,
    eos_ids: Sequence[int],
    stop_ids: Sequence[int],
    ignore_eos: bool,
    too_short: bool,
) -> NDArray[np.bool_]:
    """What a grammar allows, with the other rules on ends put to it. Changes and returns `allowed`.

    A stop token that is no part of the grammar may end an output where the grammar may end. `ignore_eos` and an output
    that is `too_short` (under `min_tokens`) keep ends out for as long as anything else may follow.
    """
    eos, stops = list(eos_ids), list(stop_ids)
    can_end = bool(allowed[eos].any())
    allowed[eos] = False
    if too_short and stops:
        needed = allowed[stops]
        allowed[stops] = False
        if not can_end and not allowed.any():
            allowed[stops] = needed
    elif can_end:
        allowed[stops] = True
    if can_end and not ((ignore_eos or too_short) and allowed.any()):
        allowed[eos] = True
    return allowed
