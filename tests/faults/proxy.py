"""A TCP proxy in a test's hands: what passes through it can be changed, held up, or cut off on both sides at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

PIECE = 1 << 16


class Proxy:
    """Listens on `address` and forwards to `there`.

    `on_answer(offset, piece)` may change what comes back: `offset` counts the bytes of that connection before it.
    """

    def __init__(self, there: str) -> None:
        self.address = ""
        self.there = there
        self.on_answer: Callable[[int, bytearray], None] = lambda offset, piece: None
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._muted: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Reset every connection that is open, on both sides."""
        for writer in self._writers:
            writer.transport.abort()

    def mute(self) -> None:
        """Swallow all that comes on the connections that are open now; new ones work."""
        self._muted |= self._writers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        host, _, port = self.there.rpartition(":")
        try:
            there_reader, there = await asyncio.open_connection(host, int(port))
            self._writers.add(there)
            try:
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(self._copy(reader, there, lambda offset, piece: None))
                    directions.create_task(self._copy(there_reader, writer, self.on_answer))
            except* (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                self._writers.discard(there)
                there.close()
        except OSError:
            pass  # nobody listens there any more
        finally:
            self._writers.discard(writer)
            writer.close()
            self._tasks.discard(task)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[int, bytearray], None]
    ) -> None:
        offset = 0
        while data := await reader.read(PIECE):
            piece = bytearray(data)
            change(offset, piece)
            offset += len(piece)
            if writer in self._muted:
                continue
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def close(self) -> None:
        """Cut everything and wait for it to be over."""
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def proxy(there: str = "") -> AsyncIterator[Proxy]:
    """A proxy to `host:port`, which may also be said later."""
    found = Proxy(there)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()
        await found.close()
