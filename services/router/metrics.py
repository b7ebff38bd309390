"""What the router measures of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class RouterMetrics:
    """`baton_router_*`. Gauges are read when scraped: the service gives each its function."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.routes = Counter(
            "baton_router_routes_total", "Plans by mode and first reason", ["mode", "reason"], registry=registry
        )
        self._routes_of: dict[tuple[str, str], Counter] = {}
        self.refusals = Counter(
            "baton_router_refusals_total", "Requests without a plan, by reason", ["reason"], registry=registry
        )
        self.route_seconds = Histogram(
            "baton_router_route_seconds",
            "Time to decide",
            registry=registry,
            buckets=(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2),
        )
        self.outcomes = Counter(
            "baton_router_outcomes_total", "Reported outcomes, by reason (ok when none)", ["reason"], registry=registry
        )
        self.reported_failures = Counter(
            "baton_router_reported_failures_total", "Failed connections told by frontends", registry=registry
        )
        self.prefetches = Counter(
            "baton_router_prefetches_total",
            "Hints to stores, by result: ok, dropped or a code",
            ["result"],
            registry=registry,
        )
        self.index_keys = Gauge("baton_router_index_keys", "Different block keys known", registry=registry)
        self.index_dropped = Gauge("baton_router_index_dropped", "Keys forgotten at the bound", registry=registry)
        self.index_gaps = Gauge("baton_router_index_gaps", "Gaps in workers' cache events", registry=registry)
        self.reservations = Gauge("baton_router_reservations", "Reservations held", registry=registry)
        self.reservations_expired = Gauge(
            "baton_router_reservations_expired", "Reservations that no worker confirmed in time", registry=registry
        )
        self.workers = Gauge("baton_router_workers", "Workers by state", ["state"], registry=registry)

    def routed(self, mode: str, reason: str) -> None:
        """Count a plan. The counter of its labels is kept: finding it takes longer than counting."""
        counter = self._routes_of.get((mode, reason))
        if counter is None:
            counter = self._routes_of[mode, reason] = self.routes.labels(mode, reason)
        counter.inc()
