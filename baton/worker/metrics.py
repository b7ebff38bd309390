"""A worker's metrics, by name."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.engine.port import EngineStats

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)


class WorkerMetrics:
    """One for each process; `registry` is what its /metrics serves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_worker_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"baton_worker_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton_worker_{name}", text, buckets=buckets, registry=registry)

        self.ttft_seconds = histogram("ttft_seconds", "Submit to an attempt's first token, on this worker.", _TTFT)
        self.itl_seconds = histogram("itl_seconds", "Between tokens of one choice, on this worker.", _ITL)
        self.output_tokens = counter("output_tokens", "Tokens sent.")
        self.attempts = counter("attempts", "Attempts admitted, by mode.", "mode")
        self.refused = counter("refused", "Submits and prefill runs refused, by reason.", "reason")
        self.attempts_failed = counter("attempts_failed", "Attempts that ended with a failure, by reason.", "reason")
        self.handbacks = counter("handbacks", "Attempts given back to be routed again, by reason.", "reason")
        self.fallbacks = counter("fallbacks", "Departures from the plan, by RouteReason.", "reason")
        self.handovers = counter("handovers", "Hand-overs tried, by result: ok or a reason.", "result")
        self.transfer_bytes = counter("transfer_bytes", "KV bytes read from peers and verified.")
        self.transfer_seconds = counter("transfer_seconds", "Seconds spent reading and verifying KV.")
        self.transfer_failures = counter("transfer_failures", "Blocks that could not be read, by reason.", "reason")
        self.store_loads = counter("store_loads", "Loads from stores, by result: ok, resting or a reason.", "result")
        self.store_loaded_tokens = counter("store_loaded_tokens", "Prompt tokens whose KV came from a store.")
        self.store_loaded_bytes = counter("store_loaded_bytes", "KV bytes read from stores and verified.")
        self.store_load_seconds = counter("store_load_seconds", "Seconds spent loading from stores.")
        self.store_offered = counter("store_offered_blocks", "Blocks offered: stored, known or a reason.", "result")
        self.store_dropped = counter("store_dropped_blocks", "Blocks that were not offered, by reason.", "reason")
        self.late_events = counter("late_events", "Engine events of attempts that had already ended.")
        self.sessions = gauge("sessions", "Open session streams.")
        self.frames = counter("frames", "Frames sent on session streams.")
        self.session_drops = counter("session_drops", "Sessions ended from here, by reason.", "reason")
        self.watch_resets = counter("watch_resets", "Watch streams sent a new snapshot because they fell behind.")
        self.prefill_runs = counter("prefill_runs", "Prefill runs for other workers, by how they ended.", "end")
        self.leases = gauge("leases", "Prefill runs that are open: KV leases.")
        self._gauges = {
            "running": gauge("running", "Requests in the engine's batch."),
            "waiting": gauge("waiting", "Requests waiting in the engine."),
            "batch_running": gauge("batch_running", "Of those in the engine's batch, the batch lane's."),
            "batch_waiting": gauge("batch_waiting", "Of those that wait, the batch lane's."),
            "queued_prefill_tokens": gauge("queued_prefill_tokens", "Prompt tokens not yet computed."),
            "blocks_total": gauge("kv_blocks_total", "KV blocks of the pool."),
            "blocks_free": gauge("kv_blocks_free", "KV blocks free or evictable."),
            "blocks_cached": gauge("kv_blocks_cached", "KV blocks that hold a cached prefix."),
            "blocks_pinned": gauge("kv_blocks_pinned", "KV blocks in use."),
            "blocks_quarantined": gauge("kv_blocks_quarantined", "KV blocks that a late read may still write to."),
            "prefill_tok_s": gauge("prefill_tokens_per_second", "Learnt prefill rate."),
            "decode_step_s": gauge("decode_step_seconds", "Learnt seconds of a decode step."),
        }
        self._totals = {
            "prompt_tokens": counter("prompt_tokens", "Prompt tokens taken in."),
            "prefill_tokens_computed": counter("prefill_tokens_computed", "Prompt tokens computed here."),
            "cached_prompt_tokens": counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache."),
            "preemptions": counter("preemptions", "Requests preempted and recomputed."),
            "batch_preemptions": counter("batch_preemptions", "Of these, the batch lane's: they gave way."),
            "given_up_steps": counter("given_up_steps", "Steps ended between two layers: all cancelled, or gave way."),
            "corrupted_blocks": counter("kv_blocks_corrupted", "Cached KV blocks whose bytes had changed: not used."),
            "unstaged_blocks": counter(
                "kv_blocks_unstaged", "Full output blocks that found no place in staging in time."
            ),
        }
        self.unwell = gauge("unwell", "1 while the engine cannot be counted on (an upstream that does not answer).")
        self._seen = dict.fromkeys(self._totals, 0)

    def engine(self, stats: EngineStats) -> None:
        """Show the engine's state."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, counter in self._totals.items():
            now = getattr(stats, name)
            if now > self._seen[name]:
                counter.inc(now - self._seen[name])
                self._seen[name] = now
