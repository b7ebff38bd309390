"""What loading from a store costs, learnt: a line through what was reported, for each store, tier and worker.

    seconds(bytes) = fixed + bytes * per_byte

Least squares over reported loads, recent ones counting for more, beside a prior that never goes: two points of the line
that the store tells of its tier, or of defaults. `fixed` is what the look-up, the wake-up and the verification cost
whatever the size: it is why a short prefix is computed although its blocks are there. What was learnt fades with time
as well: a store that was once found too slow is not asked, so only time can bring it back. A load that brought nothing
lets the pair rest: until then no plan counts on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LOOKUP_S = 0.005
"""Assumed of every load beyond what the tier itself takes: a Lookup call and a verification."""
DEFAULT_BYTES_S = {"host": 1e9, "device": 1e9, "nvme": 5e8}
SLOWEST_BYTES_S = 2e8
"""Of a tier that is not known and tells nothing."""
PRIOR_BYTES = 16 * 2**20
PRIOR_WEIGHT = 0.1
KEPT = 0.8
"""Of the weight of older loads, each time that another one is reported."""
HALF_LIFE_S = 20.0
"""In which that weight halves by itself."""
REST_S = 0.5
REST_MOST_S = 30.0


@dataclass
class _Line:
    """Weighted sums of (bytes, seconds), as of `time`."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    time: float = 0.0

    def faded(self, now: float, kept: float = 1.0) -> _Line:
        """The same sums with the weight that is left at `now`."""
        f = kept * 0.5 ** (max(0.0, now - self.time) / HALF_LIFE_S)
        return _Line(f * self.n, f * self.x, f * self.y, f * self.xx, f * self.xy, now)

    def add(self, bytes_: float, seconds: float, weight: float = 1.0) -> None:
        """One more point."""
        self.n += weight
        self.x += weight * bytes_
        self.y += weight * seconds
        self.xx += weight * bytes_ * bytes_
        self.xy += weight * bytes_ * seconds

    def at(self, bytes_: float) -> float:
        """Seconds for `bytes_`, never less than no time at all. The points must be of two sizes or more."""
        slope = max(0.0, (self.n * self.xy - self.x * self.y) / (self.n * self.xx - self.x**2))
        return max(0.0, (self.y - slope * self.x) / self.n) + slope * bytes_


@dataclass
class _Pair:
    """One store and worker: a line for each tier, and whether they rest."""

    lines: dict[str, _Line] = field(default_factory=dict)
    failures: int = 0
    resting_until: float = 0.0


class LoadRates:
    """Times are any monotonic clock's seconds. `forget` whoever is gone, and tell nothing of them later: nothing else
    bounds this."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], tuple[float, float]] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def __len__(self) -> int:
        """Pairs of store and worker of which something is known."""
        return len(self._pairs)

    def told(self, store: str, tier: str, bytes_s: float, latency_s: float) -> None:
        """What the store measured of its own tier; zeros mean not yet."""
        if bytes_s > 0:
            self._told[store, tier] = (latency_s, 1.0 / bytes_s)

    def loaded(self, store: str, tier: str, worker: str, bytes_: int, seconds: float, now: float) -> None:
        """A load took so long, whatever became of it; without a byte it failed."""
        if seconds <= 0:
            return
        pair = self._pairs.setdefault((store, worker), _Pair())
        if bytes_ <= 0:
            pair.resting_until = now + min(REST_MOST_S, REST_S * 2.0 ** min(pair.failures, 16))
            pair.failures += 1
            return
        pair.failures = 0
        line = pair.lines[tier] = pair.lines.get(tier, _Line()).faded(now, KEPT)
        line.add(bytes_, seconds)

    def seconds(self, store: str, tier: str, worker: str, bytes_: float, now: float) -> float:
        """What loading `bytes_` takes `worker`; infinite while the two rest."""
        pair = self._pairs.get((store, worker))
        if pair is not None and now < pair.resting_until:
            return math.inf
        known = pair.lines.get(tier) if pair is not None else None
        line = (known or _Line()).faded(now)
        fixed, per_byte = self._prior(store, tier)
        for point in (0.0, PRIOR_BYTES):
            line.add(point, fixed + point * per_byte, PRIOR_WEIGHT)
        return line.at(bytes_)

    def forget(self, id: str) -> None:
        """The store or worker is gone."""
        for told in [told for told in self._told if told[0] == id]:
            del self._told[told]
        for pair in [pair for pair in self._pairs if id in pair]:
            del self._pairs[pair]

    def _prior(self, store: str, tier: str) -> tuple[float, float]:
        latency_s, per_byte = self._told.get((store, tier), (0.0, 1.0 / DEFAULT_BYTES_S.get(tier, SLOWEST_BYTES_S)))
        # The tier's own speed is no better than the way from it to the worker: that of host memory, which the store
        # measures on its own READs from workers.
        _, way = self._told.get((store, "host"), (0.0, 1.0 / DEFAULT_BYTES_S["host"]))
        return LOOKUP_S + latency_s, max(per_byte, way)
