"""Connections that die without a word: what a NAT table or a firewall does to those that were idle for long."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterable
from pathlib import Path

from tests.worker_process import WorkerProcess

_SYS_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""One BPF instruction: keep nothing."""


def deafen(processes: Iterable[WorkerProcess], ports: Collection[int] = ()) -> int:
    """Every TCP connection that these processes have now, to or from one of `ports` (or at all), receives nothing any
    more, not even the news of its end; new ones are not touched. How many there were.

    Raises PermissionError where that is not allowed.
    """
    instructions = ctypes.create_string_buffer(_DROP)
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(instructions))
    deafened = 0
    for worker in processes:
        for sock in _sockets(worker.process.pid):
            with sock:
                if _connected(sock, ports):
                    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                    deafened += 1
    return deafened


def _sockets(pid: int) -> Iterable[socket.socket]:
    """The process's sockets, as descriptors of ours."""
    libc = ctypes.CDLL(None, use_errno=True)
    owner = os.pidfd_open(pid)
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if not path.readlink().name.startswith("socket:"):
                    continue
            except OSError:
                continue  # closed meanwhile
            fd = libc.syscall(_SYS_PIDFD_GETFD, owner, int(path.name), 0)
            if fd >= 0:
                yield socket.socket(fileno=fd)
            elif ctypes.get_errno() == 1:
                raise PermissionError("pidfd_getfd")
    finally:
        os.close(owner)


def _connected(sock: socket.socket, ports: Collection[int]) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    try:
        ends = {sock.getsockname()[1], sock.getpeername()[1]}
    except OSError:
        return False
    return not ports or bool(ends & set(ports))
