"""How much a frontend has under way at once. What is more is refused at the door, before it costs anything."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.errors import BatonError, Reason
from services.frontend.metrics import FrontendMetrics

SMALL_BYTES = 256 << 10
FOR_SMALL = 1 / 8
"""Of the bytes: what only bodies of up to `SMALL_BYTES` may take. A few large ones that are announced and come slowly
would else keep everybody out."""


class Gate:
    """Bounds requests, and the bytes of their bodies that are held until they have been read."""

    def __init__(self, max_requests: int, max_bytes: int, metrics: FrontendMetrics) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._requests = 0
        self._bytes = 0
        self.entered_at = 0.0
        """`time.monotonic()` of the last request that was let in."""
        self.on_enter: Callable[[], None] = lambda: None
        """Called when one was."""

    @property
    def held(self) -> tuple[int, int]:
        """Requests inside, and bytes of their bodies."""
        return self._requests, self._bytes

    def enter(self) -> Pass:
        """Let one request in; `leave` on every path. Raises BatonError(NO_CAPACITY)."""
        if self._requests >= self._max_requests:
            raise self._refusal("requests", f"This server has {self._requests} requests under way; try again soon.")
        self._requests += 1
        self.entered_at = time.monotonic()
        self.on_enter()
        return Pass(self)

    def _take(self, change: int, size: int) -> None:
        limit = self._max_bytes * (1 if size <= SMALL_BYTES else 1 - FOR_SMALL)
        if self._bytes + change > limit:
            raise self._refusal("bytes", "This server is busy reading other large requests; try again soon.")
        self._bytes += change

    def _give_back(self, requests: int, size: int) -> None:
        self._requests -= requests
        self._bytes -= size

    def _refusal(self, limit: str, message: str) -> BatonError:
        self._metrics.refused.labels(limit).inc()
        return BatonError(Reason.NO_CAPACITY, message)


class Pass:
    """One request that was let in."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._bytes = 0
        self._inside = True

    def body(self, size: int) -> None:
        """The body is, or will be, of `size` bytes. Raises BatonError(NO_CAPACITY)."""
        if size > self._bytes:
            self._gate._take(size - self._bytes, size)
            self._bytes = size

    def body_read(self) -> None:
        """The body is needed no more. Idempotent."""
        self._gate._give_back(0, self._bytes)
        self._bytes = 0

    def leave(self) -> None:
        """The request has ended. Idempotent."""
        self.body_read()
        if self._inside:
            self._inside = False
            self._gate._give_back(1, 0)
