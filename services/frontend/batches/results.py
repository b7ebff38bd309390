"""What lines came to, in two files that only grow: `<batch>.output` and `<batch>.errors`, each in OpenAI's format.

A result counts once it is on the disk (fdatasync; all that gathered meanwhile go together). After a crash the files say
which lines are done: what stands behind the last whole line of one never counted, is cut off, and runs again. So each
line's result is in exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from services.frontend.batches.batch import Batch
from services.frontend.batches.disk import Space, storage_full, sync_names
from services.frontend.batches.usage import NOTHING, Body, Usage

OUTPUT, ERRORS = "output", "errors"
PIECE = 1 << 20


class _Response(msgspec.Struct):
    body: Body = Body()


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


_decode = msgspec.json.Decoder(_Line).decode


class Results:
    """The results of one batch. `open` first; `close` on every path."""

    def __init__(self, directory: Path, batch: str, space: Space) -> None:
        self.paths = {kind: directory / f"{batch}.{kind}" for kind in (OUTPUT, ERRORS)}
        self.counts = {OUTPUT: 0, ERRORS: 0}
        self.sizes = {OUTPUT: 0, ERRORS: 0}
        """Bytes that count."""
        self.usage = NOTHING
        """Of what counts."""
        self.done: set[str] = set()
        """Custom ids of the lines that count."""
        self._space = space
        self._fds: dict[str, int] = {}
        self._pending: list[tuple[str, str, bytes, Usage, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Open them, cut off what was half written. Blocking; idempotent; raises OSError."""
        if self._fds:
            return
        for kind, path in self.paths.items():
            fd = self._fds[kind] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with path.open("rb") as file:
                for line in file:
                    found = _whole(line)
                    if found is None or found.custom_id in self.done:
                        break
                    self._counts(kind, found.custom_id, len(line))
                    if found.response is not None:
                        self.usage += found.response.body.tokens
            os.ftruncate(fd, self.sizes[kind])
            self._space.used += self.sizes[kind]
        sync_names(path.parent)

    async def add(self, kind: str, custom_id: str, line: bytes, usage: Usage = NOTHING) -> None:
        """Append a whole line, that of an answer with its `usage`. It counts when this returns; when this is cancelled
        it may count all the same, which `settle` waits for. Raises BatonError: STORAGE_FULL, INTERNAL."""
        self._space.take(len(line))
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((kind, custom_id, line, usage, mine))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_pending(), name="results")
        await mine

    async def _write_pending(self) -> None:
        """All that gathers, a group at a time; whoever waits for a line may go meanwhile."""
        while self._pending:
            entries, self._pending = self._pending, []
            error: BaseException | None = None
            try:
                await asyncio.to_thread(self._write, [(kind, line) for kind, _, line, *_ in entries])
            except OSError as failed:
                error = storage_full(failed)
            for kind, custom_id, line, usage, waiter in entries:
                if error is None:
                    self._counts(kind, custom_id, len(line))
                    self.usage += usage
                else:
                    self._space.give_back(len(line))
                if not waiter.done():
                    _settle(waiter, error)

    def _counts(self, kind: str, custom_id: str, size: int) -> None:
        self.counts[kind] += 1
        self.sizes[kind] += size
        self.done.add(custom_id)

    def _write(self, lines: Iterable[tuple[str, bytes]]) -> None:
        """All of them, or none: what a full disk took of it is cut off again."""
        together: dict[str, bytearray] = {}
        for kind, line in lines:
            together.setdefault(kind, bytearray()).extend(line)
        try:
            for kind, data in together.items():
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fds[kind], view) :]
                os.fdatasync(self._fds[kind])
        except OSError:
            for kind in together:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fds[kind], self.sizes[kind])
            raise

    def tell(self, batch: Batch) -> None:
        """How many lines came to what, and their tokens."""
        batch.done, batch.failed, batch.usage = self.counts[OUTPUT], self.counts[ERRORS], self.usage

    async def settle(self) -> None:
        """Wait until everything that was added counts, or cannot."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def close(self) -> None:
        """Settle, and close the files. Idempotent."""
        await self.settle()
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def forget(self, kind: str) -> None:
        """These bytes are accounted for elsewhere."""
        self._space.give_back(self.sizes[kind])
        self.sizes[kind] = 0

    def remove(self) -> None:
        """They are kept elsewhere, or nobody wants them. Blocking; raises OSError."""
        for path in self.paths.values():
            path.unlink(missing_ok=True)


def _settle(waiter: asyncio.Future[None], error: BaseException | None) -> None:
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
        waiter.exception()  # who waits may have gone: seen here


def _whole(line: bytes) -> _Line | None:
    """What a line says; None of one that was cut."""
    if not line.endswith(b"\n"):
        return None
    try:
        return _decode(line)
    except msgspec.MsgspecError:
        return None
