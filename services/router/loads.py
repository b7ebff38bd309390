"""What loading from a store costs, learnt: a line through what was reported, for each store, tier and worker.

    seconds(bytes) = fixed + bytes * per_byte

Least squares over reported loads, recent ones counting for more, beside a prior that never goes: two points of the line
that the store tells of its tier, or of defaults. `fixed` is what the look-up, the wake-up and the verification cost
whatever the size: it is why a short prefix is computed although its blocks are there. A load that brought nothing lets
the pair rest: until then no plan counts on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LOOKUP_S = 0.005
"""Assumed of every load beyond what the tier itself takes: a Lookup call and a verification."""
DEFAULT_BYTES_S = {"device": 2e9, "host": 1e9, "nvme": 5e8}
SLOWEST_BYTES_S = 2e8
"""Of a tier that is not known and tells nothing."""
PRIOR_BYTES = 16 * 2**20
PRIOR_WEIGHT = 0.25
KEPT = 0.8
"""Of the weight of older loads, each time that another one is reported."""
REST_S = 0.5
REST_MOST_S = 30.0


@dataclass
class _Line:
    """Weighted sums of (bytes, seconds)."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, bytes_: float, seconds: float, weight: float = 1.0) -> None:
        self.n += weight
        self.x += weight * bytes_
        self.y += weight * seconds
        self.xx += weight * bytes_ * bytes_
        self.xy += weight * bytes_ * seconds

    def decay(self) -> None:
        for name in ("n", "x", "y", "xx", "xy"):
            setattr(self, name, getattr(self, name) * KEPT)

    def at(self, bytes_: float, prior: tuple[float, float]) -> float:
        """Seconds for `bytes_`, never less than no time at all."""
        fixed, per_byte = prior
        sums = _Line(self.n, self.x, self.y, self.xx, self.xy)
        for point in (0.0, PRIOR_BYTES):
            sums.add(point, fixed + point * per_byte, PRIOR_WEIGHT)
        slope = (sums.n * sums.xy - sums.x * sums.y) / (sums.n * sums.xx - sums.x**2)
        slope = max(0.0, slope)
        return max(0.0, (sums.y - slope * sums.x) / sums.n) + slope * bytes_


@dataclass
class _Pair:
    """One store and worker: a line for each tier, and whether they rest."""

    lines: dict[str, _Line] = field(default_factory=dict)
    failures: int = 0
    resting_until: float = 0.0


class LoadRates:
    """Times are any monotonic clock's seconds. `forget` whoever is gone: nothing else bounds this."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], tuple[float, float]] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}

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
        line = pair.lines.setdefault(tier, _Line())
        line.decay()
        line.add(bytes_, seconds)

    def seconds(self, store: str, tier: str, worker: str, bytes_: float, now: float) -> float:
        """What loading `bytes_` takes `worker`; infinite while the two rest."""
        pair = self._pairs.get((store, worker))
        if pair is not None and now < pair.resting_until:
            return math.inf
        line = pair.lines.get(tier) if pair is not None else None
        return (line or _Line()).at(bytes_, self._prior(store, tier))

    def forget(self, id: str) -> None:
        """The store or worker is gone."""
        for told in [told for told in self._told if told[0] == id]:
            del self._told[told]
        for pair in [pair for pair in self._pairs if id in pair]:
            del self._pairs[pair]

    def _prior(self, store: str, tier: str) -> tuple[float, float]:
        latency_s, per_byte = self._told.get((store, tier), (0.0, 1.0 / DEFAULT_BYTES_S.get(tier, SLOWEST_BYTES_S)))
        # The tier's own speed is no better than the way from it to the worker.
        return LOOKUP_S + latency_s, max(per_byte, 1.0 / DEFAULT_BYTES_S["host"])
