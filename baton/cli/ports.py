"""Which ports are free, and who holds one that is not."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.cli.errors import CliError

HOST = "127.0.0.1"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that a server may come back to: free now, none that the system gives to a connection going out, and none
    that another call was given lately.

    A port that the kernel chooses for a listener comes from the same range as those of connections going out, so while
    the server is down any client on the machine may be given it. And between a call and the server's start others ask,
    too: they take turns (_turn). Raises CliError when nothing there is free.
    """
    end = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32768
    first = max(1024, end // 2)
    for _ in range(100):
        port = first + _turn() % (end - first)
        if is_free(port):
            return port
    raise CliError(f"no free port from {first} to {end - 1}", "free some, or choose each port yourself")


def _turn() -> int:
    """One more than this user's process before us had, whichever that was: kept in a locked file. Begins anywhere."""
    path = Path(tempfile.gettempdir()) / f"baton-ports-{os.getuid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+", encoding="ascii", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read(18)
        turn = int(before) + 1 if before.isdecimal() else random.randrange(1 << 16)
        file.seek(0)
        file.truncate()
        file.write(str(turn))
        return turn


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


@dataclass(frozen=True)
class Wanted:
    """A port that somebody asked for, what for, and the option that chooses another. 0 is always free."""

    port: int
    what: str
    option: str


def need_free(*wanted: Wanted) -> None:
    """Raise CliError, naming each port that is taken and its holder, when there is one."""
    taken = [one for one in wanted if one.port and not is_free(one.port)]
    if taken:
        told = "; ".join(f"port {one.port} for {one.what} is in use by {holder(one.port)}" for one in taken)
        options = " and ".join(one.option for one in taken)
        raise CliError(told, f"stop what has it, or choose another with {options}")
