"""The process that `bench.transport` reads from: a given arena behind one transport, a lease held throughout.

python -m bench.transport_peer nixl|tcp FD      maps the memfd FD, one JSON line out, ends when stdin does
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import uvloop

from baton.kv.arena import Arena
from baton.transfer.nixl.transport import NixlTransport
from baton.transfer.port import Transport
from baton.transfer.tcp.transport import TcpTransport

OWNER, EPOCH = "bench-peer", 7


async def serve(name: str, fd: int) -> None:
    """Be readable until stdin ends."""
    transport: Transport = NixlTransport() if name == "nixl" else TcpTransport()
    arena = Arena.attach(fd)
    await transport.start(arena, OWNER, EPOCH)
    print(json.dumps({"metadata": transport.metadata().hex()}), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    with transport.lease():
        await lines.read()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
    os._exit(0)
