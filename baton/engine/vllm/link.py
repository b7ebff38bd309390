"""Our end of the sockets to vLLM's processes: who connects gets the descriptors that are shared with it. Later its
scheduler is told of slots for output; nothing else goes that way.

The sockets lie in a directory that only this user can enter. Whoever of vLLM's processes closes one has ended, and the
engine with it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog

from baton.engine.vllm import messages as m

_log = structlog.get_logger()


class Listener:
    """`take` gets every message; `gone` is called when a process that had connected is not there any more."""

    def __init__(
        self, arena_fd: int, page_fd: int, take: Callable[[m.FromVllm], None], gone: Callable[[str], None]
    ) -> None:
        self._arena_fd = arena_fd
        self._page_fd = page_fd
        self._take = take
        self._gone = gone
        self._directory = tempfile.TemporaryDirectory(prefix="baton-vllm-")
        self.path = str(Path(self._directory.name) / "host")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._scheduler: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Listen. Raises OSError."""
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        who = "a process of vLLM's"
        try:
            hello = await self._receive(reader)
            who = "vLLM's scheduler" if isinstance(hello, m.Scheduler) else f"vLLM's rank {getattr(hello, 'rank', '?')}"
            descriptor = self._page_fd if isinstance(hello, m.Scheduler) else self._arena_fd
            raw: socket.socket = writer.get_extra_info("socket")
            # asyncio's own socket does not send descriptors; nothing was written to it, so it takes a byte at once.
            with socket.socket(fileno=os.dup(raw.fileno())) as plain:
                socket.send_fds(plain, [b"!"], [descriptor])
            if isinstance(hello, m.Scheduler):
                self._scheduler = writer
            self._take(hello)
            while True:
                self._take(await self._receive(reader))
        except (asyncio.IncompleteReadError, OSError):
            self._gone(f"{who} ended; its log says why")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _log.exception("a message of vLLM's could not be taken")
            self._gone(f"{type(error).__name__} while taking a message of {who}")
        finally:
            self._writers.discard(writer)
            writer.close()

    def spare(self, job: int, slot: int) -> None:
        """Tell the scheduler where a job's next block of output goes. Waits for nobody: there is one for each job."""
        if self._scheduler is not None:
            self._scheduler.write(m.frame(m.Spare(job, slot)))

    async def _receive(self, reader: asyncio.StreamReader) -> m.FromVllm:
        head = await reader.readexactly(m.LENGTH.size)
        return m.decoder.decode(await reader.readexactly(m.LENGTH.unpack(head)[0]))

    async def close(self) -> None:
        """Close every socket: who is on the other end ends itself. Idempotent."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()
        self._directory.cleanup()
