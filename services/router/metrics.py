"""What the router measures of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.router.route_counts import RouteCounts


class RouterMetrics:
    """`baton_router_*`. Gauges are read when scraped: the service gives each its function."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.routes = RouteCounts(registry)
        self.refusals = Counter(
            "baton_router_refusals_total", "Requests without a plan, by reason", ["reason"], registry=registry
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
        self.expected_keys = Gauge(
            "baton_router_expected_keys", "Block keys that are being computed, not told yet", registry=registry
        )
        self.expectations_refused = Gauge(
            "baton_router_expectations_refused", "Plans whose keys were not expected, at the bound", registry=registry
        )
        self.reservations = Gauge("baton_router_reservations", "Reservations held", registry=registry)
        self.reservations_expired = Gauge(
            "baton_router_reservations_expired", "Reservations that no worker confirmed in time", registry=registry
        )
        self.workers = Gauge("baton_router_workers", "Workers by state", ["state"], registry=registry)
        self.stores = Gauge("baton_router_stores", "KV stores by state", ["state"], registry=registry)
