"""The scatter-read protocol, all little-endian. A connection is one hello and then asks, one at a time.

    reader -> owner   HELLO    magic, version u16, epoch u64, owner length u16; owner
    owner -> reader   WELCOME  magic, status u8, epoch u64, arena bytes u64
    reader -> owner   ASK      count u32; count x RANGE (offset u64, length u64)
    owner -> reader   ANSWER   count status bytes; then the bytes of each range whose status is OK, in order

The reader names whom it wants in which epoch; anybody else answers STALE and hangs up. The owner checks every range
against its arena: what a peer asks is never trusted. A reader that gives up hangs up, and no byte comes after that.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence

MAGIC = b"BTNr"
VERSION = 1
HELLO = struct.Struct("<4sHQH")
WELCOME = struct.Struct("<4sBQQ")
COUNT = struct.Struct("<I")
RANGE = struct.Struct("<QQ")

OK, STALE, OUT_OF_RANGE, BAD_VERSION = 0, 1, 2, 3

MAX_OWNER = 512
MAX_RANGES = 4096
PIECE = 1 << 20
"""Bytes of one send or receive: what a loop is kept busy with at a time."""


KEEPALIVE_S = 4
PROBES = 3
"""A connection whose other end has vanished without a word is dead after KEEPALIVE_S and as many seconds as PROBES."""


class WireError(Exception):
    """The other side hung up or does not speak this protocol."""


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel find out that an idle connection is dead."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def hello(owner: str, epoch: int) -> bytes:
    """The reader's first message."""
    name = owner.encode()
    return HELLO.pack(MAGIC, VERSION, epoch, len(name)) + name


def ask(ranges: Sequence[tuple[int, int]]) -> bytes:
    """A request for `(offset, length)` ranges; at most MAX_RANGES."""
    return COUNT.pack(len(ranges)) + b"".join(RANGE.pack(*r) for r in ranges)


async def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` from `sock`. Raises WireError when the other side hangs up first, OSError when the socket breaks.

    Cancelled, or done: nothing is written into `view` any more. The loop gets a turn after each PIECE.
    """
    loop = asyncio.get_running_loop()
    at, since = 0, 0
    while at < len(view):
        got = await loop.sock_recv_into(sock, view[at : at + PIECE])
        if got == 0:
            raise WireError("the peer hung up")
        at += got
        since += got
        if since >= PIECE:
            since = 0
            await asyncio.sleep(0)


async def receive(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes; errors as `receive_into`."""
    data = bytearray(size)
    await receive_into(sock, memoryview(data))
    return bytes(data)
