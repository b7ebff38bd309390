"""The few workers worth costing exactly, out of thousands.

A role and layout of up to `whole` workers is costed whole; of a larger one the two best prefills (a plan names an
alternate) or the best worker that streams, and the decode worker with the longest hit. Who they are is found over
columns of numbers (columns.py); the exact terms of the few are policy.py's.

Ties: a noise below `tie_s` is added, another one for each request, so that equal workers take turns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np

from services.router.columns import FRESH_S, Columns, Floats
from services.router.costs import DECODE, PREFILL, Ask, Parameters, Role, WorkerState, no_loads
from services.router.devices import neighbourhood, with_neighbours
from services.router.stored import LoadTime, Reader, loads

SPARE = 8
"""Rows that a group has free at least when places are given anew."""


Kind = tuple[Role, str, int, frozenset[str]]
"""Role, layout, tokens of a block, and what an engine lacks: workers of one kind can stand for each other."""


def _kind(state: WorkerState) -> Kind:
    return state.role, state.fingerprint, state.block_size, state.lacks


class _Group:
    """Workers of one kind: rows `start` and on of the columns, dense. The last one takes the place of one
    that leaves. `room` is how many rows it has, `cost` the part of `Columns.cost` that is its own."""

    def __init__(self, role: Role, fingerprint: str, block_size: int, lacks: frozenset[str]) -> None:
        self.kind: Kind = (role, fingerprint, block_size, lacks)
        self.role = role
        self.block_size = block_size
        self.states: list[WorkerState] = []
        self.start = 0
        self.room = 0
        self.cost: Floats = np.zeros(0, np.float32)

    def load(self, ask: Ask, load_time: LoadTime) -> tuple[slice, float, float] | None:
        """Where the longest run ends that a store has for this layout, and what a token of it takes to load, on the
        word of one worker: which store is best for whom is seen among the few. As `Columns.price` takes it."""
        one = self.states[0]
        reader = Reader(one.id, one.fingerprint, one.block_size, one.block_bytes, 0, ask.reusable(one))
        options = [load for load in loads(ask.stored, reader, load_time) if load.seconds < math.inf]
        if self.role is DECODE or not options:
            return None
        best = max(options, key=lambda load: (load.tokens, -load.seconds))
        rows = slice(self.start, self.start + len(self.states))
        return rows, ask.prompt_tokens - best.tokens, best.seconds / best.tokens

    def best(self, ask: Ask) -> list[WorkerState]:
        """The cheapest that may be taken, by the costs found last; when there are none, those that lack least."""
        cost, states = self.cost, self.states
        chosen = self._lowest(cost)
        # Mostly everyone has room: it is asked of all only when one of the few has not.
        for state in chosen:
            if state.longest < ask.prompt_tokens:
                longest = np.array([state.longest for state in states], np.float32)
                cost[longest < ask.prompt_tokens] = np.inf
                return self._lowest(cost if np.isfinite(cost).any() else -longest)
        return chosen

    def _lowest(self, cost: Floats) -> list[WorkerState]:
        """The cheapest worker, of prefills the two cheapest in order: two minima are found sooner than a sorting."""
        first = int(cost.argmin())
        if self.role is not PREFILL or len(cost) == 1:
            return [self.states[first]]
        least, cost[first] = cost[first], np.inf
        second = int(cost.argmin())
        cost[first] = least
        return [self.states[first], self.states[second]]


class Fleet:
    """The workers of one model, as last put here, neighbours told of each other (devices.py)."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._groups: dict[Kind, _Group] = {}
        self._large: list[_Group] = []  # those of more than `whole` workers
        self._sizes: set[int] = set()
        self._places: dict[str, tuple[_Group, int]] = {}  # where in its group a worker is
        self._neighbourhood_of: dict[str, str] = {}
        self._neighbours: dict[str, dict[str, WorkerState]] = {}  # by that, as put, not told of each other
        self._columns = Columns(0, parameters)
        self._noise: Floats = np.zeros(0, np.float32)

    def __len__(self) -> int:
        return len(self._places)

    def put(self, state: WorkerState) -> None:
        """A worker is new, or something of it has changed (its kind only in another object)."""
        if state.device or state.id in self._neighbourhood_of:
            self._move(state.id, neighbourhood(state.device), state)
            return
        self._write(state)

    def _move(self, id: str, place: str, state: WorkerState | None) -> None:
        """A worker that has, or had, neighbours: they are told as well."""
        before = self._neighbourhood_of.pop(id, "")
        if before:
            del self._neighbours[before][id]
        if state is not None and place:
            self._neighbourhood_of[id] = place
            self._neighbours.setdefault(place, {})[id] = state
        elif state is not None:
            self._write(state)
        for touched in {before, place} - {""}:
            for told in with_neighbours(list(self._neighbours[touched].values())):
                self._write(told)
            if not self._neighbours[touched]:
                del self._neighbours[touched]

    def _write(self, state: WorkerState) -> None:
        group, row = self._places.get(state.id) or self._add(state)
        if group.states[row] is not state:
            if _kind(state) != group.kind:
                self._leave(state.id)
                group, row = self._add(state)
            group.states[row] = state
        self._columns.put(group.start + row, state)
        if state.as_of - self._columns.since > FRESH_S:
            self._give_places(state.as_of)

    def remove(self, id: str) -> None:
        """The worker is gone. Unknown ones are ignored."""
        if id in self._neighbourhood_of:
            self._move(id, "", None)
        self._leave(id)

    def _leave(self, id: str) -> None:
        place = self._places.pop(id, None)
        if place is None:
            return
        group, row = place
        last = group.states.pop()
        group.cost = group.cost[:-1]
        if last.id != id:
            group.states[row] = last
            self._places[last.id] = group, row
            self._columns.put(group.start + row, last)
        if not group.states:
            del self._groups[group.kind]
        self._regroup()

    def block_sizes(self) -> set[int]:
        """Tokens of a block, of every layout here (do not change it)."""
        return self._sizes

    def block_size(self, id: str) -> int:
        """Tokens of a block of that worker; 0 when it is not of this model."""
        place = self._places.get(id)
        return place[0].block_size if place is not None else 0

    def get(self, id: str) -> WorkerState:
        """The worker as last put, told of its neighbours. Raises KeyError."""
        group, row = self._places[id]
        return group.states[row]

    def all(self) -> list[WorkerState]:
        """Every worker."""
        return [state for group in self._groups.values() for state in group.states]

    def shortlist(self, ask: Ask, load_time: LoadTime = no_loads) -> list[WorkerState]:
        """The workers among which the cheapest plan is: the best of each role and layout, and the decode worker with
        the longest hit (its own copy is what no side formula sees)."""
        large = self._large
        if large:
            self._price(ask, large, load_time)
        chosen: list[WorkerState] = []
        for group in self._groups.values():
            chosen += group.best(ask) if group in large else group.states
        decode = self._warmest_decode(ask.hits)
        if decode is not None and all(decode is not state for state in chosen):
            chosen.append(decode)
        return chosen

    def costs(self, ask: Ask, load_time: LoadTime = no_loads) -> dict[str, float]:
        """Every worker's side of the cost of `ask`, by id: what the shortlist goes by, without its noise."""
        self._compute(ask, list(self._groups.values()), load_time)
        return {id: float(self._columns.cost[group.start + row]) for id, (group, row) in self._places.items()}

    def _price(self, ask: Ask, large: list[_Group], load_time: LoadTime) -> None:
        self._compute(ask, large, load_time)
        cost = self._columns.cost
        # The same noise for the same request, another place in it for the next one.
        rows = len(cost)
        start = zlib.crc32(ask.uid.encode()) % (len(self._noise) - rows)
        np.add(cost, self._noise[start : start + rows], cost)
        for id in ask.exclude:
            if id in self._places:
                group, row = self._places[id]
                cost[group.start + row] = np.inf

    def _compute(self, ask: Ask, groups: list[_Group], load_time: LoadTime) -> None:
        offers = [offer for group in groups if (offer := group.load(ask, load_time))] if ask.stored else []
        cached, places, prompt = [], self._places, ask.prompt_tokens
        for id, tokens in ask.hits.items():
            place = places.get(id)
            if place is not None:
                group, row = place
                cached.append((group.start + row, tokens if tokens < prompt else ask.reusable(group.states[row])))
        self._columns.price(prompt, cached, ask.output_tokens, offers, ask.now)

    def _warmest_decode(self, hits: Mapping[str, int]) -> WorkerState | None:
        warmest, longest, places = None, 0, self._places
        for id, tokens in hits.items():
            if tokens > longest and id in places and places[id][0].role is DECODE:
                warmest, longest = id, tokens
        return self.get(warmest) if warmest else None

    def _add(self, state: WorkerState) -> tuple[_Group, int]:
        """A place for a worker that has none."""
        key = _kind(state)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(*key)
        group.states.append(state)
        self._regroup()
        place = self._places[state.id] = group, len(group.states) - 1
        if len(group.states) > group.room:
            self._give_places(state.as_of)
        else:
            group.cost = self._columns.cost[group.start : group.start + len(group.states)]
        return place

    def _regroup(self) -> None:
        """What is known of the groups as a whole, after workers came or left."""
        groups = self._groups.values()
        self._large = [group for group in groups if len(group.states) > self._parameters.whole]
        self._sizes = {group.block_size for group in groups}

    def _give_places(self, now: float) -> None:
        """Lay the groups out anew, each with some room to grow."""
        start = 0
        for group in self._groups.values():
            group.start, group.room = start, SPARE + len(group.states) * 9 // 8
            start += group.room
        self._columns = Columns(start, self._parameters, max(now, self._columns.since))
        self._noise = np.random.default_rng(1).random(4 * start, np.float32) * np.float32(self._parameters.tie_s)
        for group in self._groups.values():
            group.cost = self._columns.cost[group.start : group.start + len(group.states)]
            for row, state in enumerate(group.states, group.start):
                self._columns.put(row, state)
