"""Which ports are free, and who holds one that is not."""

from __future__ import annotations

import socket

import psutil

from baton.cli.errors import CliError

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def holder(port: int) -> str:
    """Who listens on the port, in words, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port
            if listens and connection.pid:
                process = psutil.Process(connection.pid)
                return f"pid {process.pid} ({' '.join(process.cmdline())[:80] or process.name()})"
    except psutil.Error:
        pass
    return "another user's process"


def need_free(port: int, what: str, option: str) -> None:
    """Raise CliError, naming the port and its holder, when the port is taken. 0 is always free."""
    if port and not is_free(port):
        raise CliError(f"port {port} for {what} is in use by {holder(port)}", f"stop it, or choose {option}")
