"""What the batch lane counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class BatchMetrics:
    """Metrics of files and batches, in the frontend's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_frontend_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"baton_frontend_{name}", text, registry=registry)

        self.batches = counter("batches", "Batches by how they ended.", "status")
        self.lines = counter("batch_lines", "Lines of batches by how they ended: ok or a reason.", "outcome")
        self.retries = counter("batch_retries", "Attempts at lines that were refused or broke, by reason.", "reason")
        self.gave_way = counter("batch_gave_way", "Lines stopped because others wanted the place; they go on later.")
        self.pauses = counter(
            "batch_pauses", "Workers told to compute no lines for now: told, busy (still told), or why not.", "result"
        )
        self.prompt_tokens = counter("batch_prompt_tokens", "Tokens of prompts of lines that were answered.")
        self.output_tokens = counter("batch_output_tokens", "Tokens of answers of lines.")
        self.running = gauge("batch_running", "Outputs of lines that have a place on a worker.")
        self.waiting = gauge("batch_waiting", "Lines that wait for a place.")
        self.file_bytes = gauge("file_bytes", "Bytes of files, and of results of batches that run.")
        self.expired = counter("files_expired", "Files that were removed because their expires_after had passed.")
        self.files = gauge("files", "Files that are kept.")
