"""The few workers worth costing exactly, out of thousands: the sides of costs.py over columns of numbers.

A role and layout of up to `whole` workers is costed whole; of a larger one the two best prefills (a plan names an
alternate) or the best worker that streams, and the decode worker with the longest hit. To find those, each group keeps
one array for each number that a side's formula needs; a side over 1,000 workers is then some ten array operations of
about a microsecond each. A row is written when its worker changes, never for a request. The exact terms of the few are
policy.py's; `own_cost`, `prefill_side` and `decode_side` are written twice, and a test holds the two together.

Ties: a noise below `tie_s` is added, another one for each request, so that equal workers take turns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from services.router.costs import Ask, Parameters, Role, WorkerState, no_loads
from services.router.stored import LoadTime, Reader, loads

_Floats = NDArray[np.float64]
COLUMNS = 6
"""queue, token_s, step, streams, per_output, share_step: `_numbers` says what each is."""


class _Group:
    """Workers of one role and layout. Rows are dense: the last one takes the place of one that leaves."""

    def __init__(self, role: Role, block_size: int) -> None:
        self.role = role
        self.block_size = block_size
        self.states: list[WorkerState] = []
        self.rows: dict[str, int] = {}
        self._table = np.zeros((COLUMNS, 8))
        self._views: list[_Floats] = []
        self._capacity: list[float] = []
        self._noise = np.zeros(0)
        self._tie_s = 0.0

    def put(self, state: WorkerState) -> None:
        row = self.rows.get(state.id)
        if row is None:
            row = self.rows[state.id] = len(self.states)
            self.states.append(state)
            self._capacity.append(0.0)
            self._views = []
            if row == self._table.shape[1]:
                self._table = np.hstack([self._table, np.zeros_like(self._table)])
        self.states[row] = state
        self._capacity[row] = _capacity(state)
        self._table[:, row] = _numbers(state)

    def remove(self, id: str) -> None:
        row = self.rows.pop(id)
        self._views = []
        last, capacity = self.states.pop(), self._capacity.pop()
        if last.id != id:
            self.states[row], self._capacity[row] = last, capacity
            self.rows[last.id] = row
            self._table[:, row] = self._table[:, len(self.states)]

    def best(self, ask: Ask, turn: int, parameters: Parameters, load_time: LoadTime) -> list[WorkerState]:
        """The cheapest that may be taken; when there are none, those that lack least. `turn` says who of equal ones."""
        count, limit = len(self.states), 2 if self.role is Role.PREFILL else 1
        if count <= parameters.whole:
            return list(self.states)
        cost = self._cost(ask, parameters, load_time)
        cost += self._turns(turn, parameters.tie_s)
        if ask.exclude:
            cost[[self.rows[id] for id in ask.exclude if id in self.rows]] = np.inf
        chosen = _cheapest(cost, limit)
        # Mostly everyone has room: it is asked of all only when one of the few has not.
        if min([self._capacity[row] for row in chosen]) < ask.prompt_tokens:
            capacity = np.array(self._capacity)
            cost[capacity < ask.prompt_tokens] = np.inf
            chosen = _cheapest(cost if np.isfinite(cost).any() else -capacity, limit)
        return [self.states[row] for row in chosen]

    def _turns(self, turn: int, tie_s: float) -> _Floats:
        """A noise of up to `tie_s` for each row, the same for the same `turn`."""
        count = len(self.states)
        if len(self._noise) < 2 * count or self._tie_s != tie_s:
            self._noise, self._tie_s = np.random.default_rng(1).random(4 * count) * tie_s, tie_s
        start = turn % (len(self._noise) - count)
        return self._noise[start : start + count]

    def _uncached(self, ask: Ask) -> float | _Floats:
        """Tokens to compute, by row: one number when no worker of this group has a hit."""
        most = (ask.prompt_tokens - 1) // self.block_size * self.block_size
        rows = self.rows
        hits = [(rows[id], tokens) for id, tokens in ask.hits.items() if id in rows]
        if not hits:
            return float(ask.prompt_tokens)
        uncached = np.empty(len(self.states))
        uncached.fill(ask.prompt_tokens)
        for row, tokens in hits:
            uncached[row] -= min(tokens, most)
        return uncached

    def _load(self, ask: Ask, load_time: LoadTime) -> tuple[int, float] | None:
        """The end of the longest run that a store has for this layout, in tokens, and what a token of it takes to load,
        on the word of one worker of the group: which store is best for whom is seen among the few."""
        one = self.states[0]
        reader = Reader(one.id, one.fingerprint, one.block_size, one.block_bytes, 0, ask.reusable(one))
        options = [load for load in loads(ask.stored, reader, load_time) if load.seconds < math.inf]
        if not options:
            return None
        best = max(options, key=lambda load: (load.tokens, -load.seconds))
        return best.tokens, best.seconds / best.tokens

    def _cost(self, ask: Ask, parameters: Parameters, load_time: LoadTime = no_loads) -> _Floats:
        if not self._views:
            self._views = list(self._table[:, : len(self.states)])
        queue, token_s, step, streams, per_output, share_step = self._views
        cost: _Floats
        if self.role is Role.DECODE:
            cost = ask.output_tokens * per_output
            cost += queue
            return cost
        uncached = self._uncached(ask)
        freeze = token_s * uncached
        cost = np.maximum(freeze, step)
        load = self._load(ask, load_time) if ask.stored else None
        if load is not None:
            rest, load_token_s = ask.prompt_tokens - load[0], load[1]
            loading = np.maximum(token_s * rest, step) + load_token_s * np.maximum(0.0, uncached - rest)
            freeze = np.where(loading < cost, np.minimum(token_s * rest, freeze), freeze)
            cost = np.minimum(cost, loading)
        cost += queue
        if self.role is Role.PREFILL:
            return cost
        later = freeze * step
        later *= parameters.assumed_arrivals_s
        np.maximum(later, share_step, out=later)
        np.minimum(later, step, out=later)
        later += per_output
        later *= ask.output_tokens
        cost += later
        freeze *= parameters.stall_weight
        freeze *= streams + parameters.assumed_streams
        cost += freeze
        return cost


def _cheapest(cost: _Floats, limit: int) -> list[int]:
    """The one or two rows of the lowest, lowest first: two minima are found sooner than a sorting."""
    first = int(cost.argmin())
    if limit == 1 or len(cost) == 1:
        return [first]
    least, cost[first] = cost[first], np.inf
    second = int(cost.argmin())
    cost[first] = least
    return [first, second]


def _capacity(state: WorkerState) -> float:
    """The longest prompt that it takes, in tokens; -1 when it takes none."""
    if state.unusable:
        return -1.0
    capacity = (state.blocks_free - 1) * state.block_size if state.blocks_total else math.inf
    if state.max_context:
        capacity = min(capacity, state.max_context - (state.role is not Role.PREFILL))
    return capacity


def _numbers(state: WorkerState) -> tuple[float, ...]:
    """A row. `per_output` is what one output token waits for the batch and the queue, and on a decode worker for later
    prompts; `share_step` what it waits for those on another one, as far as measured."""
    excess = 0 if state.role is Role.PREFILL else max(0, state.streams + 1 - state.max_streams)
    per_output = (state.streams + excess) * state.step_s / state.max_streams
    share_step = state.step_s * min(1.0, state.prefill_share)
    if state.role is Role.DECODE:
        per_output += share_step
    return (
        state.queued_tokens / state.prefill_tok_s,
        1.0 / state.prefill_tok_s,
        state.step_s,
        state.streams,
        per_output,
        share_step,
    )


class Fleet:
    """The workers of one model, as last put here."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Role, str, int, frozenset[str]], _Group] = {}
        self._group_of: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def put(self, state: WorkerState) -> None:
        """A worker is new, or something of it has changed."""
        key = (state.role, state.fingerprint, state.block_size, state.grammars)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(state.role, state.block_size)
        before = self._group_of.get(state.id)
        if before is not None and before is not group:
            self.remove(state.id)
        group.put(state)
        self._group_of[state.id] = group

    def remove(self, id: str) -> None:
        """The worker is gone. Unknown ones are ignored."""
        group = self._group_of.pop(id, None)
        if group is not None:
            group.remove(id)
            if not group.states:
                self._groups = {key: kept for key, kept in self._groups.items() if kept is not group}

    def block_sizes(self) -> set[int]:
        """Tokens of a block, of every layout here."""
        return {size for _, _, size, _ in self._groups}

    def block_size(self, id: str) -> int:
        """Tokens of a block of that worker; 0 when it is not of this model."""
        group = self._group_of.get(id)
        return group.block_size if group is not None else 0

    def get(self, id: str) -> WorkerState:
        """The worker as last put. Raises KeyError."""
        group = self._group_of[id]
        return group.states[group.rows[id]]

    def all(self) -> list[WorkerState]:
        """Every worker."""
        return [state for group in self._groups.values() for state in group.states]

    def shortlist(self, ask: Ask, parameters: Parameters, load_time: LoadTime = no_loads) -> list[WorkerState]:
        """The workers among which the cheapest plan is: the best of each role and layout, and the decode worker with
        the longest hit (its own copy is what no side formula sees)."""
        turn = zlib.crc32(ask.uid.encode())
        chosen = [state for group in self._groups.values() for state in group.best(ask, turn, parameters, load_time)]
        decode = self._warmest_decode(ask.hits)
        if decode is not None and all(decode is not state for state in chosen):
            chosen.append(decode)
        return chosen

    def _warmest_decode(self, hits: Mapping[str, int]) -> WorkerState | None:
        groups = self._group_of
        warm = [id for id in hits if id in groups and groups[id].role is Role.DECODE]
        return self.get(max(warm, key=hits.__getitem__)) if warm else None
