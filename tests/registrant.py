"""A process that registers and listens, for tests that stop or kill it: `python -m tests.registrant ETCD ID`.

Prints its port, then a line for every lease it lost.
"""

from __future__ import annotations

import asyncio
import sys

from baton.registry import Registry
from baton.v1 import registry_pb2


async def _run(etcd: str, id: str) -> None:
    async def hello(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    registry = Registry([etcd], "test")
    await registry.register("workers", id, registry_pb2.Worker(id=id, address=f"127.0.0.1:{port}"))
    print(port, flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], sys.argv[2]))
