"""uvicorn as this frontend needs it: its own signals, and a way to drop a connection that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.errors import BatonError, Reason
from services.frontend.respond import ABORT_EXTENSION

DRAIN_S = 8
BACKLOG = 2048
SEND_BUFFER = 128 << 10
"""Bytes the kernel may hold for a client: left to itself it takes 4 MB for each one that does not read (measured), and
we would not notice before."""


class _Protocol(HttpToolsProtocol):
    """Offers `baton.abort`: closing waits until everything is written, which a client that does not read prevents."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}


class Server(uvicorn.Server):
    """Leaves signals to `main`, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled where the process is wired."""
        yield


def make_server(app: FastAPI) -> Server:
    """The HTTP server, not yet listening."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
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
    sock.set_inheritable(True)
    return sock
