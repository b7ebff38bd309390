"""What was used, until others were used since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Cache:
    """Blocks by key, least recently used first; of one prompt the last block goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def keys(self) -> list[bytes]:
        """All that is here, least recently used first."""
        return list(self._keys)

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` are here, from the first on."""
        return next((place for place, key in enumerate(keys) if key not in self._keys), len(keys))

    def use(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Hold `keys` from now on, their beginning when they are more than it can hold. Returns what is new and what
        had to go."""
        keys = keys[: self._capacity]
        stored = [key for key in keys if key not in self._keys]
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        removed = []
        while len(self._keys) > self._capacity:
            removed.append(self._keys.popitem(last=False)[0])
        return stored, removed

    def clear(self) -> list[bytes]:
        """The machine died. Returns what was here."""
        held = list(self._keys)
        self._keys.clear()
        return held
