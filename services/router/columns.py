"""The sides of costs.py over columns of numbers: every worker of a model at once.

A row is written when its worker changes, never for a request. All roles go through one formula, because an array
operation over 1,000 numbers takes hardly longer than one over 300; what a role has not is a column of zeros:

    cost = queue + compute + min(beside, compute) + stall * uncached
         + output * (per_output + min(most, max(share, later * uncached)))
    compute = max(token_s * uncached, pass_s)
    queue = max(0, free - now), at most `step` where uncached <= short

So `own_cost`, `prefill_side` and `decode_side` are written twice; a test holds the two together. What is worked out
lies in arrays that are used again for the next request: fresh memory would cost more than the arithmetic. So would more
calls: products and lower bounds of several columns, which lie side by side, are one call each.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from services.router.costs import (
    BATCH_WAYS,
    BESIDE_WAYS,
    DECODE,
    PREFILL,
    Parameters,
    WorkerState,
    short_queue_tokens,
)

Floats = NDArray[np.float32]
"""Half as wide as the costs themselves: what it leaves out is below any tie, and a half is sooner gone through."""
COLUMNS = 9
FRESH_S = 1000.0
"""Columns are made anew for a moment that is further from their `since`: there they still tell 0.1 ms apart."""


class Columns:
    """Numbers of up to `rows` workers, all 0 at first. Moments are kept as seconds after `since`, because narrow
    numbers have no room for those of a clock (`FRESH_S`)."""

    def __init__(self, rows: int, parameters: Parameters, since: float = 0.0) -> None:
        self._rows = rows
        self.since = since
        self._parameters = parameters
        self._table = table = np.zeros((COLUMNS + 1, rows), np.float32)  # one more: a queue is at least nothing
        self._of_token, self._least = table[:3], table[7:]
        self._free, self._per_output, self._most, self._beside = table[3:7]
        self._token_s, self._pass_s = table[1], table[7]
        self._short, self._step = np.zeros((2, rows), np.float32)
        self._neighbours = self._overtaking = False
        self.cost = np.zeros(rows, np.float32)
        """Seconds, by row: what `price` found last."""
        self._uncached = np.zeros((3, rows), np.float32)  # thrice the same: what is of one shape is sooner multiplied
        self._cells = cast("MutableSequence[float]", self._uncached.reshape(-1).data)  # one is written sooner so
        terms = np.zeros((4, rows), np.float32)
        self._grown, self._bounded = terms[:3], terms[1:]
        self._stall, self._compute, self._of_output, self._queue = terms

    def put(self, row: int, state: WorkerState) -> None:
        """Write the numbers of `state`."""
        if state.beside_queue_s > 0.0:
            self._neighbours = True
        if state.short_tokens:
            self._overtaking = True
        if self._overtaking:
            self._short[row] = state.short_tokens
            self._step[row] = short_queue_tokens(state) / state.prefill_tok_s if state.short_tokens else 0.0
        self._table[:COLUMNS, row] = _numbers(state, self._parameters, self.since)

    def price(
        self,
        prompt_tokens: float,
        cached: list[tuple[int, int]],
        output_tokens: float,
        loads: list[tuple[slice, float, float]],
        now: float,
    ) -> None:
        """Work out `cost` of every row at `now`. `cached` are those that hold some of the prompt: (row, tokens). Of
        each of `loads`, the rows may load the prompt up to its last `rest` tokens at `token_s` seconds for each that
        they lack: (rows, rest, token_s)."""
        cost, compute, of_output, rows = self.cost, self._compute, self._of_output, self._rows
        self._uncached.fill(prompt_tokens)
        cells = self._cells
        for row, tokens in cached:
            cells[row] = cells[row + rows] = cells[row + 2 * rows] = prompt_tokens - tokens
        overtakes = self._uncached[0] <= self._short if self._overtaking else None
        loading = [(of, self._load(of, rest, token_s)) for of, rest, token_s in loads] if loads else ()
        np.multiply(self._of_token, self._uncached, self._grown)
        np.subtract(self._free, now - self.since, self._queue)
        np.maximum(self._bounded, self._least, out=self._bounded)
        if overtakes is not None:
            np.minimum(self._queue, self._step, out=self._queue, where=overtakes)
        for of, seconds in loading:
            compute[of] = seconds
        if self._neighbours:
            np.add(compute, np.minimum(compute, self._beside), compute)
        np.minimum(of_output, self._most, out=of_output)
        np.add(of_output, self._per_output, of_output)
        np.multiply(of_output, output_tokens, of_output)
        np.add(compute, self._queue, cost)
        np.add(cost, of_output, cost)
        np.add(cost, self._stall, cost)

    def _load(self, rows: slice, rest: float, token_s: float) -> Floats:
        """The seconds of loading or of computing, whichever are fewer. Where it is loading, the `rest` is all that is
        left uncached."""
        uncached = self._uncached[0, rows]
        computing = np.maximum(self._token_s[rows] * uncached, self._pass_s[rows])
        loading = np.maximum(self._token_s[rows] * rest, self._pass_s[rows])
        loading += token_s * np.maximum(0.0, uncached - rest)
        self._uncached[:, rows] = np.where(loading < computing, np.minimum(rest, uncached), uncached)
        fewer: Floats = np.minimum(loading, computing)
        return fewer


def _numbers(state: WorkerState, parameters: Parameters, since: float) -> tuple[float, ...]:
    """A row, in the order of the columns: stall, token_s, later, free, per_output, most, beside, pass_s, share.

    `free` is when its queue is done; `per_output` is what one output token costs by the batch, the queue and
    other cores, and on a decode worker for later prompts; `share` what it waits for those on a merged one, as far as
    measured, and `later` what it is assumed to, for each token to compute."""
    free = state.as_of - since + state.queued_tokens / state.prefill_tok_s
    if state.role is PREFILL:
        token_s = 1.0 / state.prefill_tok_s
        stall = state.beside_streams * token_s
        return stall, token_s, 0.0, free, 0.0, 0.0, state.beside_queue_s, state.step_s, 0.0
    longer = state.stream_s * (state.streams + state.beside_streams)
    most = state.step_s + longer
    per_output = BATCH_WAYS * longer + BESIDE_WAYS * state.beside_share * most + state.waking_s
    excess = state.streams + 1 - state.max_streams
    if excess > 0:
        per_output += excess * (state.step_s + state.stream_s * (state.max_streams - 1)) / state.max_streams
    share = most * state.prefill_share if state.prefill_share < 1.0 else most
    if state.role is DECODE:
        return 0.0, 0.0, 0.0, free, per_output + share, 0.0, 0.0, 0.0, 0.0
    token_s = 1.0 / state.prefill_tok_s
    later = parameters.assumed_arrivals_s * most * token_s
    frozen = (state.streams + parameters.assumed_streams) * parameters.stall_weight
    stall = (frozen + state.beside_streams) * token_s
    return stall, token_s, later, free, per_output, most, state.beside_queue_s, state.step_s, share
