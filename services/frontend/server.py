"""uvicorn as this frontend needs it: it leaves as `main` says."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import Callable, Iterator

import structlog
import uvicorn
from fastapi import FastAPI

from baton.errors import BatonError, Reason
from services.frontend.drain import TELL_S, Requests
from services.frontend.protocol import HttpProtocol

CLOSE_S = 1
"""How long connections may take to close once their requests have ended."""
ASK_S = 1.0
"""A connection is idle for so long before it is closed: its client may be about to ask, and was perhaps answered last
before it could be told `Connection: close`."""
BACKLOG = 2048
SEND_BUFFER = 128 << 10
"""Bytes the kernel may hold for a client: left to itself it takes 4 MB for each one that does not read (measured), and
we would not notice before."""

_log = structlog.get_logger()


class Server(uvicorn.Server):
    """Leaves signals to `main`, says when it listens, and leaves as `drain.py` says."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._sockets: list[socket.socket] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        self._sockets = sockets or []
        await super().startup(sockets)
        self.listening.set()

    async def leave(self, requests: Requests, linger_s: float, drain_s: float) -> None:
        """Drain. When it returns, `serve` is about to."""
        end = time.monotonic() + drain_s
        requests.draining = True
        await asyncio.sleep(min(linger_s, drain_s))
        await self._stop_accepting()
        while await requests.finished(end - time.monotonic()):
            await asyncio.sleep(max(0.0, min(ASK_S, end - time.monotonic())))
            if not len(requests):
                self._close_idle()
                break
        else:
            _log.warning("ending what still runs", requests=len(requests), drain_s=drain_s)
            requests.end()
            await requests.finished(TELL_S)
        self.should_exit = True

    def _close_idle(self) -> None:
        """Close connections without a request."""
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def _stop_accepting(self) -> None:
        """Close the listening socket. Connections stay, those included that wait in its queue: closing would reset
        them, and their clients could not know whether they had been heard."""
        waiting = [connection for sock in self._sockets for connection in _accepted(sock)]
        for server in self.servers:
            server.close()
        for connection in waiting:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(self.config, self.server_state, self.lifespan.state)
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled where the process is wired."""
        yield


def _accepted(sock: socket.socket) -> Iterator[socket.socket]:
    """What waits in the queue of a listening socket that does not block."""
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = sock.accept()
            connection.setblocking(False)
            yield connection


def make_server(app: FastAPI, client_stall_s: float, slow: Callable[[], None]) -> Server:
    """The HTTP server, not yet listening. `slow` is called for each client that does not send the head of a request
    within `client_stall_s`, and is cut off."""
    config = uvicorn.Config(
        app,
        http=functools.partial(HttpProtocol, head_s=client_stall_s, slow=slow),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
        timeout_keep_alive=65,
        backlog=BACKLOG,
    )
    return Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A listening address. Raises BatonError naming it when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # inherited by its connections
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise BatonError(Reason.INVALID_REQUEST, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock
