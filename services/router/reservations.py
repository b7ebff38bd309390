"""Predicted load, counted from the moment of selection until the worker itself reports it.

Between a plan and the load report that shows it lies a gap in which every request would pick the same idle worker. A
reservation closes it: taken with the plan, keyed by (uid, attempt), ended part by part as each worker reports the uid
as admitted, and in any case after `ttl_s`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Held:
    """What is reserved on one worker."""

    prefill_tokens: float = 0.0
    streams: int = 0
    blocks: int = 0
    short_tokens: float = 0.0
    """Of `prefill_tokens`, those of prompts that overtake longer ones."""

    def add(self, other: Held, sign: int = 1) -> None:
        """Add (or with `sign` -1 take away) another one."""
        self.prefill_tokens += sign * other.prefill_tokens
        self.streams += sign * other.streams
        self.blocks += sign * other.blocks
        self.short_tokens += sign * other.short_tokens


@dataclass(slots=True)
class _Reservation:
    expires: float
    parts: dict[str, Held] = field(default_factory=dict)


NOTHING = Held()


class Reservations:
    """Totals by worker are kept as they change: reading one costs nothing."""

    def __init__(self, ttl_s: float = 2.0) -> None:
        self._ttl_s = ttl_s
        self._open: OrderedDict[tuple[str, int], _Reservation] = OrderedDict()
        self._attempts: dict[str, set[int]] = {}
        self._totals: dict[str, Held] = {}
        self._changed: set[str] = set()
        self._due = -math.inf
        """No open one expires before that."""
        self.expired = 0

    def __len__(self) -> int:
        return len(self._open)

    def take(self, uid: str, attempt: int, parts: dict[str, Held], now: float) -> None:
        """Reserve `parts` (by worker id), which are ours from now on. The same (uid, attempt) again replaces the
        earlier one."""
        key = uid, attempt
        if key in self._open:
            self.end(uid, attempt)
        self._open[key] = _Reservation(now + self._ttl_s, parts)
        self._attempts.setdefault(uid, set()).add(attempt)
        for worker, held in parts.items():
            total = self._totals.get(worker)
            if total is None:
                total = self._totals[worker] = Held()
            total.add(held)
        self._changed.update(parts)

    def changed(self) -> set[str]:
        """Workers whose total has changed since this was last asked."""
        changed, self._changed = self._changed, set()
        return changed

    def on(self, worker: str) -> Held:
        """What is reserved on `worker` (do not change it)."""
        return self._totals.get(worker, NOTHING)

    def admitted(self, worker: str, uid: str) -> None:
        """`worker` reports `uid` itself from now on: its part ends, for every attempt."""
        for attempt in list(self._attempts.get(uid, ())):
            reservation = self._open[uid, attempt]
            held = reservation.parts.pop(worker, None)
            if held is not None:
                self._give_back(worker, held)
            if not reservation.parts:
                self._close(uid, attempt)

    def end(self, uid: str, attempt: int) -> None:
        """The attempt is over or planned anew. Unknown ones are ignored."""
        if (uid, attempt) in self._open:
            for worker, held in self._close(uid, attempt).parts.items():
                self._give_back(worker, held)

    def forget(self, worker: str) -> None:
        """The worker is gone: so is what was reserved on it."""
        if worker not in self._totals:
            return
        for (uid, attempt), reservation in list(self._open.items()):
            if reservation.parts.pop(worker, None) is not None and not reservation.parts:
                self._close(uid, attempt)
        self._totals.pop(worker, None)
        self._changed.add(worker)

    def expire(self, now: float) -> None:
        """End what is older than the time to live. All live equally long, so the oldest come first."""
        while self._open and self._due <= now:
            (uid, attempt), reservation = next(iter(self._open.items()))
            self._due = reservation.expires
            if reservation.expires <= now:
                self.expired += 1
                self.end(uid, attempt)

    def check_integrity(self) -> list[str]:
        """Findings in words: totals must be the sum of what is open."""
        sums: dict[str, Held] = {}
        for reservation in self._open.values():
            for worker, held in reservation.parts.items():
                sums.setdefault(worker, Held()).add(held)
        findings = [
            f"reservations: {worker} holds {self.on(worker)}, the open ones sum to {sums.get(worker, NOTHING)}"
            for worker in sums.keys() | self._totals.keys()
            if abs(self.on(worker).prefill_tokens - sums.get(worker, NOTHING).prefill_tokens) > 1e-6
            or self.on(worker).streams != sums.get(worker, NOTHING).streams
            or self.on(worker).blocks != sums.get(worker, NOTHING).blocks
        ]
        if {(uid, a) for uid, attempts in self._attempts.items() for a in attempts} != set(self._open):
            findings.append("reservations: attempts by uid differ from the open ones")
        return findings

    def _close(self, uid: str, attempt: int) -> _Reservation:
        attempts = self._attempts[uid]
        attempts.discard(attempt)
        if not attempts:
            del self._attempts[uid]
        return self._open.pop((uid, attempt))

    def _give_back(self, worker: str, held: Held) -> None:
        total = self._totals.get(worker)
        if total is None:
            return
        total.add(held, -1)
        self._changed.add(worker)
        if not total.streams and not total.blocks and total.prefill_tokens < 1e-6:
            del self._totals[worker]
