"""The sides of costs.py over columns of numbers: every worker of a model at once.

A row is written when its worker changes, never for a request. All roles go through one formula, because an array
operation over 1,000 numbers takes hardly longer than one over 300; what a role has not is a column of zeros:

    cost = max(0, free - now) + compute + min(beside, compute) + stall * freeze
         + output * (per_output + min(most, max(share, later * freeze)))
    compute = max(freeze, pass_s)
    freeze = token_s * uncached

So `own_cost`, `prefill_side` and `decode_side` are written twice; a test holds the two together. What is worked out
lies in arrays that are used again for the next request: fresh memory would cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from services.router.costs import Parameters, Role, WorkerState

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
        table = np.zeros((COLUMNS, rows), np.float32)
        self._cells = _cells(table.reshape(-1))
        self._free, self._token_s, self._pass_s, self._per_output = table[:4]
        self._later, self._share, self._most, self._stall, self._beside = table[4:]
        self._neighbours = False
        self.cost = np.zeros(rows, np.float32)
        """Seconds, by row: what `price` found last."""
        self._uncached = np.zeros(rows, np.float32)
        self._uncached_cells = _cells(self._uncached)
        self._freeze = np.zeros(rows, np.float32)
        self._of_output = np.zeros(rows, np.float32)
        self._zeros = np.zeros(rows, np.float32)  # a number among the operands costs more than a column of it

    def put(self, row: int, state: WorkerState) -> None:
        """Write the numbers of `state`."""
        cells, rows = self._cells, self._rows
        self._neighbours = self._neighbours or state.beside_queue_s > 0.0
        for number in _numbers(state, self._parameters, self.since):
            cells[row] = number
            row += rows

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
        cost, freeze, of_output, uncached = self.cost, self._freeze, self._of_output, self._uncached
        uncached.fill(prompt_tokens)
        cells = self._uncached_cells
        for row, tokens in cached:
            cells[row] = prompt_tokens - tokens
        np.multiply(self._token_s, uncached, freeze)
        np.maximum(freeze, self._pass_s, out=cost)
        for rows, rest, token_s in loads:
            self._load(rows, rest, token_s)
        if self._neighbours:
            np.add(cost, np.minimum(cost, self._beside), cost)
        np.subtract(self._free, now - self.since, of_output)
        np.maximum(of_output, self._zeros, out=of_output)
        np.add(cost, of_output, cost)
        np.multiply(freeze, self._later, of_output)
        np.maximum(of_output, self._share, out=of_output)
        np.minimum(of_output, self._most, out=of_output)
        np.add(of_output, self._per_output, of_output)
        np.multiply(of_output, output_tokens, of_output)
        np.add(cost, of_output, cost)
        np.multiply(freeze, self._stall, freeze)
        np.add(cost, freeze, cost)

    def _load(self, rows: slice, rest: float, token_s: float) -> None:
        """Where loading is sooner than computing, count that."""
        cost, freeze, uncached = self.cost[rows], self._freeze[rows], self._uncached[rows]
        computing = self._token_s[rows] * rest
        loading = np.maximum(computing, self._pass_s[rows]) + token_s * np.maximum(0.0, uncached - rest)
        freeze[:] = np.where(loading < cost, np.minimum(computing, freeze), freeze)
        np.minimum(cost, loading, out=cost)


def _cells(array: Floats) -> MutableSequence[float]:
    """The same memory: one number is written sooner through this than through an array."""
    return cast("MutableSequence[float]", array.data)


def _numbers(state: WorkerState, parameters: Parameters, since: float) -> tuple[float, ...]:
    """A row, in the order of the columns. `free` is when its queue is done; `per_output` is what one output token waits
    for the batch and the queue, and on a decode worker for later prompts; `share` what it waits for those on a merged
    one, as far as measured, and `later` what it is assumed to, for each second of freezing."""
    free = state.as_of - since + state.queued_tokens / state.prefill_tok_s
    beside = state.beside_queue_s
    if state.role is Role.PREFILL:
        stall = state.beside_streams * parameters.stall_weight
        return free, 1.0 / state.prefill_tok_s, state.step_s, 0.0, 0.0, 0.0, 0.0, stall, beside
    streams = state.streams + state.beside_streams
    per_output = batch = state.stream_s * streams
    excess = state.streams + 1 - state.max_streams
    if excess > 0:
        per_output += excess * (state.step_s + state.stream_s * (state.max_streams - 1)) / state.max_streams
    most = state.step_s + batch
    share = most * min(1.0, state.prefill_share)
    if state.role is Role.DECODE:
        return free, 0.0, 0.0, per_output + share, 0.0, 0.0, 0.0, 0.0, 0.0
    later = parameters.assumed_arrivals_s * most
    stall = (streams + parameters.assumed_streams) * parameters.stall_weight
    return free, 1.0 / state.prefill_tok_s, state.step_s, per_output, later, share, most, stall, beside
