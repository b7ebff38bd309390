"""What processes use of a core while nothing happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

WINDOW_S = 5.0
WINDOWS = 5


def idle_shares(used: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """By name, the least share of a core in any of several windows; `used()` are CPU seconds so far.

    The same idle work takes more CPU time while others keep the machine busy. What spins, or looks each millisecond,
    does so in every window.
    """
    least: dict[str, float] = {}
    for _ in range(WINDOWS):
        before, began = used(), time.monotonic()
        time.sleep(WINDOW_S)
        after, passed = used(), time.monotonic() - began
        for name, seconds in after.items():
            least[name] = min(least.get(name, 1.0), (seconds - before[name]) / passed)
    return least
