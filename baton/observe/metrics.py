"""`/metrics` of one process, in Prometheus' text format."""

from __future__ import annotations

import asyncio
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from baton.errors import BatonError, Reason


class MetricsServer:
    """Serves `registry` (and the process's own figures) at `http://host:port/metrics`, from a thread of its own."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self._host = host
        self._port = port
        self._registry = registry
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None
        self.url = ""
        """Known once started."""

    async def start(self) -> None:
        """Listen. Raises BatonError(INVALID_REQUEST) naming the address when it is taken."""
        ProcessCollector(registry=self._registry)
        try:
            self._server, self._thread = start_http_server(self._port, self._host, self._registry)
        except OSError as error:
            raise BatonError(
                Reason.INVALID_REQUEST, f"cannot listen on {self._host}:{self._port}: {error}", param="metrics_port"
            ) from error
        self.url = f"http://{self._host}:{self._server.server_port}/metrics"

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
