"""What a frontend counts."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.route import RouteReason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_AS_PLANNED = frozenset(
    {
        RouteReason.DISAGGREGATED,
        RouteReason.MERGED_CHEAPEST,
        RouteReason.LOCAL_CHEAPEST,
        RouteReason.MERGED_ONLY,
    }
)


class FrontendMetrics:
    """Every metric of the frontend, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_frontend_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Requests by endpoint and how they ended.", "endpoint", "outcome")
        self.refused = counter("refused", "Requests refused before they were read, by the bound that was met.", "bound")
        self.unauthorized = counter("unauthorized", "Requests without a valid API key.")
        self.bodies = counter("bodies", "Bodies read, by where: a thread, or the process for large ones.", "where")
        self.routes = counter("routes", "Finished requests by the mode they ran in.", "mode")
        self.fallbacks = counter("fallbacks", "Requests that did not run as first planned, by why and how.", "reason")
        self.attempts = counter("attempts", "Attempts submitted to workers.")
        self.attempt_failures = counter("attempt_failures", "Attempts that ended in a failure.", "reason")
        self.resumes = counter("resumes", "Attempts that continue an output after a failure.", "reason")
        self.dropped = counter("dropped_events", "Events not taken: of old attempts, doubled, or after a gap.", "why")
        self.slow_clients = counter("slow_clients", "Clients cut off because they did not read.")
        self.disconnects = counter("disconnects", "Clients that went away before their answer was complete.")
        self.aborts = counter("aborts", "Abort calls to workers, by result.", "result")
        self.sessions_lost = counter("sessions_lost", "Session streams that broke, by worker and why.", "worker", "why")
        self.router_failures = counter("router_failures", "Router calls that failed, by reason.", "reason")
        self.own_choices = counter("own_choices", "Requests placed without a router.")
        self.reports_dropped = counter("reports_dropped", "Outcomes that no router was told.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.chat_tokens = counter("chat_tokens", "Tokens of chat prompts, by how they were made.", "how")
        self.output_tokens = counter("output_tokens", "Tokens sent to clients.")
        self.tenant_tokens = counter(
            "tenant_tokens", "Tokens of finished requests of named tenants, by kind: prompt, cached, output.",
            "tenant", "kind",
        )  # fmt: skip
        self.kv_bytes = counter("kv_bytes", "KV bytes handed over for finished requests.")

        self.responses_evicted = counter("responses_evicted", "Kept responses that had to go before their time.", "why")
        self.responses_bytes = Gauge("baton_frontend_responses_bytes", "Bytes of kept responses.", registry=registry)
        self.active = Gauge("baton_frontend_active_requests", "Requests being served.", registry=registry)
        self.waiting = Gauge("baton_frontend_waiting_requests", "Requests without a first token.", registry=registry)
        self.sessions = Gauge("baton_frontend_sessions", "Live session streams.", registry=registry)
        self.ready = Gauge("baton_frontend_ready", "1 when a completion can be served.", registry=registry)
        self.ttft = Histogram(
            "baton_frontend_ttft_seconds", "Request to first token.", buckets=_SECONDS, registry=registry
        )
        self.resume = Histogram(
            "baton_frontend_resume_seconds",
            "What a resumed output waited for: detect (from the lost worker's last sign of progress to its loss), "
            "place (to the choice of the worker that took it), token (Submit, prompt and first new token there).",
            ("part",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.itl = Histogram(
            "baton_frontend_itl_seconds", "Between a choice's events.", buckets=_GAPS, registry=registry
        )
        self.duration = Histogram(
            "baton_frontend_request_seconds", "Whole requests.", buckets=_SECONDS, registry=registry
        )

    def count_route(self, mode: str, reasons: Sequence[str]) -> None:
        """Count where a request ran, and each reason why that was not the first choice."""
        self.routes.labels(mode).inc()
        for reason in reasons:
            if reason not in _AS_PLANNED:
                self.fallbacks.labels(reason).inc()
