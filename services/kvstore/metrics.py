"""What the store measures of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


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
        self.used_bytes = Gauge("baton_kvstore_used_bytes", "Bytes in use", ["tier"], registry=registry)
        self.capacity_bytes = Gauge("baton_kvstore_capacity_bytes", "Bytes there are", ["tier"], registry=registry)
        self.blocks = Gauge("baton_kvstore_blocks", "Blocks that can be found", ["tier"], registry=registry)
        self.pinned = Gauge("baton_kvstore_pinned_blocks", "Blocks held by look-ups", ["tier"], registry=registry)
        self.quarantined = Gauge(
            "baton_kvstore_quarantined_slots", "Slots that late reads may reach", registry=registry
        )
