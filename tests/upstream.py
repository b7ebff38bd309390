"""A foreign OpenAI-compatible server for tests, scripted: it stands for what we do not write, and breaks as told.

It answers `/v1/models` and `/v1/completions` over plain sockets, so that a test can send what no HTTP library would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

MODEL = "their-model"


@dataclass
class Asked:
    """One completion that was asked for, with the ways to answer it."""

    body: dict[str, Any]
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the caller has closed its connection."""

    async def send(self, raw: bytes) -> None:
        """These bytes, as they are."""
        self.writer.write(raw)
        await self.writer.drain()

    async def begin(self) -> None:
        """The head of a stream that ends with the connection."""
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")

    async def event(self, chunk: dict[str, Any] | str) -> None:
        """One event; a text is sent as it is."""
        data = chunk if isinstance(chunk, str) else json.dumps(chunk)
        await self.send(f"data: {data}\n\n".encode())

    async def text(self, text: str, finish: str | None = None, **more: Any) -> None:
        """A chunk."""
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})

    async def usage(self, completion: int, *, prompt: int = 5, cached: int | None = None) -> None:
        """What a server tells at the end."""
        told: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        if cached is not None:
            told["prompt_tokens_details"] = {"cached_tokens": cached}
        await self.event({"choices": [], "usage": told})

    async def play(self, pieces: list[str], finish: str = "length") -> None:
        """All of it, a token a piece."""
        await self.begin()
        for piece in pieces:
            await self.text(piece)
        await self.text("", finish)
        await self.usage(len(pieces))
        await self.event("[DONE]")

    def reset(self) -> None:
        """Break the connection as a host that has crashed does."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def fail(self, status: int, body: Any) -> None:
        """An answer that is no stream."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} Whatever\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
        await self.send(head.encode() + content)


Script = Callable[[Asked], Awaitable[None]]


async def hello(asked: Asked) -> None:
    """The script of a server that is well."""
    await asked.play([" one", " two"][: asked.body["max_tokens"]])


class ScriptedUpstream:
    """`script` answers completions. `models` is what `/v1/models` says; None: it does not answer."""

    def __init__(self, script: Script = hello, **card: Any) -> None:
        self.script = script
        self.models: list[dict[str, Any]] | None = [{"id": MODEL, "object": "model", "owned_by": "vllm", **card}]
        self.models_status = 200
        self.key = ""
        """When set, who does not bring it is refused."""
        self.asked: list[Asked] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As when the process is killed: every connection breaks, and no new one is taken."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> ScriptedUpstream:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        headers = {name.lower(): value for name, value in lines.items()}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(json.loads(body) if body else {}, writer, reader)
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            await asked.fail(401, {"error": {"message": "who are you?"}})
        elif head.startswith("GET /v1/models "):
            if self.models is None:
                await asyncio.Event().wait()
            await asked.fail(self.models_status, {"object": "list", "data": self.models})
        elif head.startswith("POST /v1/completions "):
            self.asked.append(asked)
            async with _watching(asked):
                await self.script(asked)
        else:
            await asked.fail(404, {"error": {"message": "no such path"}})


@contextlib.asynccontextmanager
async def _watching(asked: Asked) -> AsyncIterator[None]:
    """The caller says nothing more: what can be read is the end of its connection."""

    async def watch() -> None:
        with contextlib.suppress(ConnectionError):
            await asked.reader.read(1)
        asked.gone.set()

    task = asyncio.create_task(watch())
    try:
        yield
    except ConnectionError:
        asked.gone.set()
        raise
    finally:
        task.cancel()
