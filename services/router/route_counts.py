"""Plans counted, and how long each took to decide.

Plain numbers, made into samples when Prometheus asks: a route is counted some thousand times between two questions, and
a metric of the client library takes a lock for each number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2)
"""Upper bounds in seconds; one more is without a bound."""


class RouteCounts(Collector):
    """`baton_router_routes_total` and `baton_router_route_seconds`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._plans: Counter[tuple[str, str]] = Counter()
        self._taken = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        registry.register(self)

    def add(self, mode: str, reason: str, seconds: float) -> None:
        """A plan of `mode` and first `reason` was decided in `seconds`."""
        self._plans[mode, reason] += 1
        self._taken[bisect_left(BUCKETS, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """The samples, as Prometheus' library asks for them."""
        plans = CounterMetricFamily("baton_router_routes", "Plans by mode and first reason", labels=["mode", "reason"])
        for labels, count in list(self._plans.items()):
            plans.add_metric(labels, count)
        yield plans
        up_to = [floatToGoString(bound) for bound in (*BUCKETS, float("inf"))]  # type: ignore[no-untyped-call]
        buckets = list(zip(up_to, map(float, accumulate(self._taken)), strict=True))
        yield HistogramMetricFamily("baton_router_route_seconds", "Time to decide", buckets, self._seconds)
