"""Where one output stands in its grammar: a function of the tokens that are out, and of nothing else.

So an output that moves to another worker, is preempted or forked goes on exactly: its tokens are taken in again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray


class GrammarFailedError(Exception):
    """The grammar cannot be followed any further; the message says why."""


class Follower:
    """One output's state. `compiled` stays as it is."""

    def __init__(self, compiled: LLMatcher) -> None:
        self._matcher = compiled.deep_copy()
        self._taken = 0

    def allowed(self, output: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may follow `output`, bool [vocab_size]: the ends of text where the grammar may end.

        `output` has what it had at the last call, and what came since. Raises GrammarFailedError.
        """
        new = list(output[self._taken :])
        if new and not self._matcher.consume_tokens(new):
            raise GrammarFailedError(f"the output so far does not follow its grammar: {self._matcher.get_error()}")
        self._taken = len(output)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarFailedError(f"the grammar takes too long to follow: {self._matcher.get_error()}")
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


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
