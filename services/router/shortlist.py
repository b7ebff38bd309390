"""The few workers worth costing exactly, out of thousands: the sides of costs.py over columns of numbers.

A request is costed among the `shortlist` best of each role and layout. To find those, each group keeps one array for
each number that a side's formula needs; a side over 1,000 workers is then some ten array operations of about a
microsecond each. A row is written when its worker changes, never for a request. The exact terms of the few are
policy.py's, so what decides is written down once; `own_cost`, `prefill_side` and `decode_side` are written twice, and
a test holds the two to each other.

Ties: a noise below `tie_s` is added, another one for each request, so that equal workers take turns.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from services.router.costs import Ask, Parameters, Role, WorkerState

_Floats = NDArray[np.float64]
_COLUMNS = ("capacity", "queue", "token_s", "step", "streams", "per_output", "share")
_BARRED = -1.0


class _Group:
    """Workers of one role and layout. Rows are dense: the last one takes the place of one that leaves."""

    def __init__(self, role: Role, block_size: int) -> None:
        self.role = role
        self.block_size = block_size
        self.states: list[WorkerState] = []
        self.rows: dict[str, int] = {}
        self._table = np.zeros((len(_COLUMNS), 8))
        self._noise = np.random.default_rng(1).random(16)

    def put(self, state: WorkerState) -> None:
        row = self.rows.get(state.id)
        if row is None:
            row = self.rows[state.id] = len(self.states)
            self.states.append(state)
            if row == self._table.shape[1]:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
                self._noise = np.random.default_rng(1).random(4 * row)
        self.states[row] = state
        self._table[:, row] = _numbers(state)

    def remove(self, id: str) -> None:
        row = self.rows.pop(id)
        last = self.states.pop()
        if last.id != id:
            self.states[row] = last
            self.rows[last.id] = row
            self._table[:, row] = self._table[:, len(self.states)]

    def best(self, ask: Ask, parameters: Parameters) -> list[WorkerState]:
        """The `shortlist` cheapest that may be taken; when there are none, those that lack least."""
        count, limit = len(self.states), parameters.shortlist
        if count <= limit:
            return list(self.states)
        capacity = self._table[0, :count]
        cost = self._cost(ask, parameters)
        start = zlib.crc32(ask.uid.encode()) % (len(self._noise) - count)
        cost += parameters.tie_s * self._noise[start : start + count]
        cost[capacity < ask.prompt_tokens] = np.inf
        if ask.exclude:
            cost[[self.rows[id] for id in ask.exclude if id in self.rows]] = np.inf
        chosen = np.argpartition(cost, limit)[:limit]
        if np.isinf(cost[chosen]).all():
            chosen = np.argpartition(-capacity, limit)[:limit]
        return [self.states[row] for row in chosen.tolist()]

    def _uncached(self, ask: Ask) -> float | _Floats:
        """Tokens to compute, by row: one number when no worker of this group has a hit."""
        most = (ask.prompt_tokens - 1) // self.block_size * self.block_size
        rows = self.rows
        hits = [(rows[id], tokens) for id, tokens in ask.hits.items() if id in rows]
        if not hits:
            return float(ask.prompt_tokens)
        uncached = np.full(len(self.states), float(ask.prompt_tokens))
        at, cached = zip(*hits, strict=True)
        uncached[list(at)] -= np.minimum(cached, most)
        return uncached

    def _cost(self, ask: Ask, parameters: Parameters) -> _Floats:
        _, queue, token_s, step, streams, per_output, share = self._table[:, : len(self.states)]
        if self.role is Role.DECODE:
            return queue + ask.output_tokens * (per_output + step * share)  # type: ignore[no-any-return]
        freeze = token_s * self._uncached(ask)
        cost = queue + np.maximum(freeze, step)
        if self.role is Role.PREFILL:
            return cost  # type: ignore[no-any-return]
        cost += freeze * (streams + parameters.assumed_streams) * parameters.stall_weight
        later = np.minimum(1.0, np.maximum(share, parameters.assumed_arrivals_s * freeze))
        cost += ask.output_tokens * (per_output + step * later)
        return cost  # type: ignore[no-any-return]


def _numbers(state: WorkerState) -> tuple[float, ...]:
    """A row. `capacity` is the longest prompt that it takes; `per_output` what one output token waits for batch and
    queue."""
    capacity = (state.blocks_free - 1) * state.block_size if state.blocks_total else np.inf
    if state.max_context:
        capacity = min(capacity, state.max_context - (state.role is not Role.PREFILL))
    excess = 0 if state.role is Role.PREFILL else max(0, state.streams + 1 - state.max_streams)
    return (
        _BARRED if state.unusable else capacity,
        state.queued_tokens / state.prefill_tok_s,
        1.0 / state.prefill_tok_s,
        state.step_s,
        state.streams,
        (state.streams + excess) * state.step_s / state.max_streams,
        state.prefill_share,
    )


class Fleet:
    """The workers of one model, as last put here."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Role, str, int], _Group] = {}
        self._group_of: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def put(self, state: WorkerState) -> None:
        """A worker is new, or something of it has changed."""
        key = (state.role, state.fingerprint, state.block_size)
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
        return {size for _, _, size in self._groups}

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

    def shortlist(self, ask: Ask, parameters: Parameters) -> list[WorkerState]:
        """The workers among which the cheapest plan is: the `shortlist` best of each role and layout, and the decode
        worker with the longest hit (its own copy is what no side formula sees)."""
        chosen = [state for group in self._groups.values() for state in group.best(ask, parameters)]
        decode = self._warmest_decode(ask.hits)
        if decode is not None and all(decode is not state for state in chosen):
            chosen.append(decode)
        return chosen

    def _warmest_decode(self, hits: Mapping[str, int]) -> WorkerState | None:
        groups = self._group_of
        warm = [id for id in hits if id in groups and groups[id].role is Role.DECODE]
        return self.get(max(warm, key=hits.__getitem__)) if warm else None
