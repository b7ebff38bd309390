"""Whether anybody still has use for the layout of what a store holds.

A store has one layout at a time. When the fleet has moved to another one (a new engine, another block size) the old
blocks can never be served again, and as long as they are here no others can come in. A layout is in use while a
registered worker has it, and for `rest_s` after somebody asked with it: an engine that registers no layout (SGLang's
ranks) is known by its calls alone. Unused, it gives way, but only to somebody who has called here with another one. A
worker calls once, when it pairs, and then leaves a store of another layout alone: so a call counts for as long as a
worker of its layout is registered, and without one when it came at most `rest_s` before ours was used last.
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
        self._given_way = False
        """Since ours was used last. Pins and late reads may keep it here for a while after that."""
        self._called: dict[str, float] = {}
        """When somebody asked last with another layout."""

    def asked(self, fingerprint: str, ours: str) -> None:
        """A call with this layout, while the store's own is `ours` ("" = none)."""
        self._settle_on(ours)
        if fingerprint == ours:
            self._use()
        elif fingerprint:
            self._called[fingerprint] = self._clock()

    def successor(self, ours: str, registered: Iterable[str]) -> str:
        """The layout that `ours` is to give way to, told once; "" while it is not. `registered` are those of the
        workers now."""
        self._settle_on(ours)
        present = set(registered)
        if ours in present:
            self._use()
        since = self._used - self._rest_s
        self._called = {other: at for other, at in self._called.items() if other in present or at >= since}
        in_use = ours in present or self._clock() - self._used < self._rest_s
        if not ours or in_use or self._given_way:
            return ""
        self._given_way = bool(self._called)
        return max(self._called, key=self._called.__getitem__, default="")

    def _settle_on(self, ours: str) -> None:
        if ours != self._ours:
            self._ours = ours
            self._called.pop(ours, None)
            self._use()

    def _use(self) -> None:
        self._used = self._clock()
        self._given_way = False
