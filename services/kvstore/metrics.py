"""What the store measures of itself."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.kvstore.tier import Tier


class KvStoreMetrics:
    """`baton_kvstore_*`. Gauges are read when scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lookups = Counter("baton_kvstore_lookup_blocks_total", "Blocks asked for", ["result"], registry=registry)
        self.stored = Counter("baton_kvstore_stored_blocks_total", "Blocks read and sealed", registry=registry)
        self.stored_bytes = Counter("baton_kvstore_stored_bytes_total", "Bytes read and sealed", registry=registry)
        self.known = Counter("baton_kvstore_known_blocks_total", "Offered blocks already here", registry=registry)
        self.refused = Counter(
            "baton_kvstore_refused_blocks_total", "Offered blocks not stored", ["reason"], registry=registry
        )
        self.evicted = Counter("baton_kvstore_evicted_blocks_total", "Blocks that went", ["reason"], registry=registry)
        self.read_seconds = Histogram(
            "baton_kvstore_read_seconds", "Time of one READ batch from a worker, verified", registry=registry
        )
        self._promoted = Counter(
            "baton_kvstore_promoted_blocks_total", "Blocks wanted from a lower tier", ["result"], registry=registry
        )
        self._not_written = Counter(
            "baton_kvstore_not_written_blocks_total", "Blocks that write-behind left out", ["reason"], registry=registry
        )
        self._tier = Counter(
            "baton_kvstore_tier_operations_total",
            "Blocks stored to, loaded from and found in lower tiers",
            ["tier", "operation", "outcome"],
            registry=registry,
        )
        self.used_bytes = Gauge("baton_kvstore_used_bytes", "Bytes in use", ["tier"], registry=registry)
        self.capacity_bytes = Gauge("baton_kvstore_capacity_bytes", "Bytes there are", ["tier"], registry=registry)
        self.blocks = Gauge("baton_kvstore_blocks", "Blocks that can be found", ["tier"], registry=registry)
        self.pinned = Gauge("baton_kvstore_pinned_blocks", "Blocks held by look-ups", ["tier"], registry=registry)
        self.usable = Gauge(
            "baton_kvstore_tier_usable", "1 while the tier is used, 0 while it is not", ["tier"], registry=registry
        )
        self.overflows = Counter(
            "baton_kvstore_watch_overflows_total", "Watchers that were too slow and start over", registry=registry
        )
        self.dirty = Gauge(
            "baton_kvstore_tier_dirty",
            "1 while a restart could bring back what was cleared",
            ["tier"],
            registry=registry,
        )
        self.unforgotten = Counter(
            "baton_kvstore_unforgotten_total",
            "Times that this process ended while a restart could bring back what was cleared",
            ["tier"],
            registry=registry,
        )
        self.quarantined = Gauge(
            "baton_kvstore_quarantined_slots", "Slots that late reads may reach", registry=registry
        )

    def promoted(self, result: str, number: int) -> None:
        """So many blocks came up, or did not."""
        self._promoted.labels(result).inc(number)

    def not_written(self, reason: str) -> None:
        """A block was not copied below."""
        self._not_written.labels(reason).inc()

    def tier(self, tier: str) -> Callable[[str, str, int], None]:
        """What a lower tier counts with: operation, outcome, number."""
        return lambda operation, outcome, number: self._tier.labels(tier, operation, outcome).inc(number)

    def watch(self, tier: Tier) -> None:
        """Read a tier's gauges when scraped."""
        name, stats = tier.name, tier.stats
        self.dirty.labels(name).set_function(lambda: tier.dirty)
        self.unforgotten.labels(name)
        self.used_bytes.labels(name).set_function(lambda: stats().used_bytes)
        self.capacity_bytes.labels(name).set_function(lambda: stats().capacity_bytes)
        self.blocks.labels(name).set_function(lambda: stats().blocks)
        self.pinned.labels(name).set_function(lambda: stats().pinned)
        self.usable.labels(name).set_function(lambda: stats().state.startswith("ok"))
