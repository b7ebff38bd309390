"""Whether anybody still has use for the layout of what a store holds.

A store has one layout at a time. When the fleet has moved to another one (a new engine, another block size) the old
blocks can never be served again, and as long as they are here no others can come in. A layout is in use while a
registered worker has it, and for `rest_s` after somebody asked with it: an engine that registers no layout (SGLang's
ranks) is known by its calls alone. Unused, it gives way, but only to somebody: without a worker of, or a call for,
another layout it stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable


class LayoutUse:
    """Of one store. `rest_s` and `clock` in seconds."""

    def __init__(self, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_s = rest_s
        self._clock = clock
        self._ours = ""
        self._used = 0.0
        self._other = ""
        """The layout that somebody asked with since ours was used last."""

    def asked(self, fingerprint: str, ours: str) -> None:
        """A call with this layout, while the store's own is `ours` ("" = none)."""
        self._settle_on(ours)
        if fingerprint == ours:
            self._use()
        elif fingerprint:
            self._other = fingerprint

    def successor(self, ours: str, registered: Iterable[str]) -> str:
        """The layout that `ours` is to give way to; "" while it is not. `registered` are those of the workers now."""
        self._settle_on(ours)
        present = {fingerprint for fingerprint in registered if fingerprint}
        if ours in present:
            self._use()
        if not ours or ours in present or self._clock() - self._used < self._rest_s:
            return ""
        return min(present, default=self._other)

    def _settle_on(self, ours: str) -> None:
        if ours != self._ours:
            self._ours = ours
            self._use()

    def _use(self) -> None:
        self._used = self._clock()
        self._other = ""
