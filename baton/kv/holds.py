"""Sealed blocks kept in place for a reader outside (a store), whether who computed them has gone or not."""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.pool import BlockPool


class Holds:
    """Holds by number. Under the engine's lock, like the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[int, list[int]] = {}

    def take(self, number: int, keys: Sequence[bytes]) -> list[int]:
        """Hold the slots of those of `keys` that can be found; which ones, in order."""
        slots = self._pool.find(keys)
        self._pool.hold(slots)
        self._held[number] = slots
        return slots

    def drop(self, number: int) -> None:
        """Let go. Unknown numbers are ignored."""
        # Last block first: a prefix is evicted from its end.
        self._pool.drop(reversed(self._held.pop(number, [])))

    @property
    def slots(self) -> list[int]:
        """Every held slot, once for each hold."""
        return [slot for slots in self._held.values() for slot in slots]

    def findings(self) -> list[str]:
        """Open holds, in words."""
        return [f"{len(slots)} blocks are held for a reader (hold {n})" for n, slots in self._held.items()]
