"""Memory of every process over a long run: flat, or growing."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass, field

import psutil

from tests.faults.suite.stack import FaultStack

EVERY_S = 5.0
GROWTH = 1.05
GROWTH_BYTES = 16 << 20
"""The last third's median may be this much above the middle third's: allocators breathe."""


@dataclass
class Memory:
    """Resident bytes (shared pages aside) of each process that lived through the whole run, its children apart."""

    seconds: float
    samples: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the time is up."""
        return max(0.0, self.began + self.seconds - time.monotonic())

    async def watch(self, stack: FaultStack) -> None:
        """Take samples for ever."""
        self.began = time.monotonic()
        while True:
            for name, pid in stack.pids().items():
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    for member in (process, *process.children(recursive=True)):
                        info = member.memory_info()
                        label = name if member == process else f"a child of {name}"
                        self.samples.setdefault((label, member.pid), []).append(info.rss - info.shared)
            await asyncio.sleep(EVERY_S)

    def _thirds(self) -> dict[str, tuple[float, float]]:
        most = max((len(values) for values in self.samples.values()), default=0)
        whole = {name: values for (name, _), values in self.samples.items() if len(values) == most and most >= 6}
        return {
            name: (statistics.median(v[most // 3 : 2 * most // 3]), statistics.median(v[2 * most // 3 :]))
            for name, v in whole.items()
        }

    def lines(self) -> list[str]:
        """A line for each process that lived through it all."""
        return [
            f"memory of {name}: {middle / 2**20:.1f} MiB in the middle third, {last / 2**20:.1f} in the last"
            for name, (middle, last) in sorted(self._thirds().items())
        ]

    def findings(self) -> list[str]:
        """Those that grew."""
        return [
            f"memory of {name} grew from {middle / 2**20:.1f} to {last / 2**20:.1f} MiB"
            for name, (middle, last) in sorted(self._thirds().items())
            if last > max(middle * GROWTH, middle + GROWTH_BYTES)
        ]
