"""The other side of the conformance tests: a process that owns an arena of known bytes and can be read from.

    python peer.py '{"transport": "tcp", "owner": "p", "epoch": 7, "blocks": 8, "block_bytes": 65536, ...}'

It writes one JSON line with what a reader needs, then obeys lines on stdin, answering each with one JSON line:
`lease` / `release` hold and free a lease, `flip N` inverts a byte in block N, `cpu` tells the CPU seconds used.
The end of stdin ends it, so it never outlives its test.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
import time

from baton.kv.arena import Arena
from baton.kv.handle import checksum
from baton.transfer.nixl.transport import NixlTransport
from baton.transfer.port import Transport
from baton.transfer.tcp.transport import TcpTransport


def content(owner: str, epoch: int, block: int, size: int) -> bytes:
    """The bytes of a block: other ones for each owner, epoch and block."""
    seed = checksum(owner.encode(), epoch, block, b"").to_bytes(8, "little")
    return (seed * (size // 8 + 1))[:size]


async def serve(order: dict) -> None:
    transport: Transport = NixlTransport() if order["transport"] == "nixl" else TcpTransport()
    owner, epoch, size = order["owner"], order["epoch"], order["block_bytes"]
    arena = Arena.create(order["blocks"] * size)
    for block in range(order["blocks"]):
        arena.view(block * size, size)[:] = content(owner, epoch, block, size)
    await transport.start(arena, owner, epoch)
    say({"metadata": base64.b64encode(transport.metadata()).decode(), "arena_bytes": arena.size})
    lines: asyncio.StreamReader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    with contextlib.ExitStack() as leases:
        while line := (await lines.readline()).split():
            word = line[0].decode()
            if word == "lease":
                leases.enter_context(transport.lease())
            elif word == "release":
                leases.pop_all().close()
            elif word == "flip":
                arena.buffer[int(line[1]) * size + size // 2] ^= 0xFF
            say({"done": word, "cpu": time.process_time()})


def say(answer: dict) -> None:
    """One line to the test."""
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
    os._exit(0)
