"""Which ports are free, and who holds one that is not."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import psutil

from baton.cli.errors import CliError

HOST = "127.0.0.1"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that a server may come back to: free now, and none that the system gives to a connection going out.

    A port that the kernel chooses for a listener comes from the same range as those of connections going out, so while
    the server is down any client on the machine may be given it. Raises CliError when nothing there is free.
    """
    low = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32768
    for _ in range(100):
        port = random.randrange(max(1024, low // 2), low)
        if is_free(port):
            return port
    raise CliError(f"no free port below {low}", "free some, or choose each port yourself")


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
