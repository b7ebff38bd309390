"""What became of SGLang's pages. Prometheus counters; in SGLang's multi-process mode its own /metrics shows them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class Counters:
    """One set for each storage object, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.found = self._counter("found_pages", "Pages that the store said it has.")
        self.loaded = self._counter("loaded_pages", "Pages read from the store and verified.")
        self.loaded_bytes = self._counter("loaded_bytes", "Their bytes.")
        self.load_seconds = self._counter("load_seconds", "Time spent loading, in whole batches.")
        self.stored = self._counter("stored_pages", "Pages that the store has taken, or had.")
        self.stored_bytes = self._counter("stored_bytes", "Bytes of the pages that it took.")
        self.store_seconds = self._counter("store_seconds", "Time spent storing, in whole batches.")
        self.missed = self._counter("missed_pages", "Pages that were to be loaded and were not.", "reason")
        self.dropped = self._counter("dropped_pages", "Pages that were to be stored and were not.", "reason")
        self.failed = self._counter("failed_lookups", "Look-ups that the store did not answer.", "reason")

    def value(self, name: str, reason: str | None = None) -> float:
        """A counter's value now; 0 for one that was never used."""
        labels = {} if reason is None else {"reason": reason}
        return self.registry.get_sample_value(f"baton_sglang_{name}_total", labels) or 0.0

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"baton_sglang_{name}", help, labels, registry=self.registry)
