"""Plans counted in plain numbers look to Prometheus as its own metrics would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from services.router.route_counts import BUCKETS, RouteCounts


def test_counts_by_labels_and_times_by_bucket() -> None:
    registry = CollectorRegistry()
    counts = RouteCounts(registry)
    counts.add("local", "LOCAL_CHEAPEST", 0.0001)  # a bound belongs to its bucket
    counts.add("local", "LOCAL_CHEAPEST", 0.004)
    counts.add("merged", "MERGED_ONLY", 9.0)
    labels = {"mode": "local", "reason": "LOCAL_CHEAPEST"}
    assert registry.get_sample_value("baton_router_routes_total", labels) == 2
    assert registry.get_sample_value("baton_router_route_seconds_sum") == 9.0041


def test_the_histogram_is_what_the_library_would_say() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = RouteCounts(ours)
    histogram = Histogram("baton_router_route_seconds", "Time to decide", registry=theirs, buckets=BUCKETS)
    for seconds in (0.0, *BUCKETS, 0.0003, 0.06, 7.0):
        counts.add("merged", "MERGED_ONLY", seconds)
        histogram.observe(seconds)
    said = {line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line}
    assert said <= set(generate_latest(ours).decode().splitlines())
