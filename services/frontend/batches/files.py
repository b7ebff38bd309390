"""The files that are kept: `<id>.data`, and beside it `<id>.json` with what is known of it, written last.

A file is there when its record is; data without one is what an interrupted upload left, and goes at the next start. One
whose time has passed is no more for whoever asks; its bytes go when no batch needs them (`expire`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from baton.errors import BatonError, Reason
from services.frontend.batches.disk import Space, storage_full, sync_names, to_end, write_whole
from services.frontend.batches.expiry import DEFAULT_S

MAX_FILES = 10_000
UPLOADS_AT_ONCE = 8
UPLOAD, RESULT = "batch", "batch_output"
"""Purposes."""

_log = structlog.get_logger()


class File(msgspec.Struct, frozen=True):
    """What is known of a file. `created` and `expires` are unix seconds (None, of older ones: it stays); `sha256` of
    its bytes in hex, `lines` those that end; `tenant` whose it is ("" of older ones): nobody else is told of it."""

    id: str
    bytes: int
    created: int
    filename: str
    purpose: str
    sha256: str
    lines: int
    expires: int | None = None
    tenant: str = ""

    def over(self, now: float) -> bool:
        """Whether its time has passed."""
        return self.expires is not None and now >= self.expires

    def shown(self) -> dict[str, Any]:
        """As OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
            "baton": {"sha256": self.sha256, "lines": self.lines},
        }


def new_id(kind: str) -> str:
    """A new name that nobody has."""
    return f"{kind}{secrets.token_hex(12)}"


def check_id(id: str, kind: str) -> str:
    """The name, when it is of our making. Raises BatonError(NOT_FOUND): nothing else is a path."""
    what = "File" if kind == "file-" else "Batch"
    rest = id.removeprefix(kind)
    if rest == id or len(rest) != 24 or not set(rest) <= set("0123456789abcdef"):
        raise BatonError(Reason.NOT_FOUND, f"No such {what} object: {id[:80]}", param="id")
    return id


class Files:
    """The files of one directory. Blocking work is done in threads."""

    def __init__(self, directory: Path, space: Space, max_bytes: int) -> None:
        self._directory = directory
        self._space = space
        self._max_bytes = max_bytes
        self._known: dict[str, File] = {}
        self._uploads = 0
        self.in_use: Callable[[str], str | None] = lambda _: None
        """The batch that needs a file."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, id: str) -> bool:
        return id in self._known

    def open(self) -> None:
        """Find what is there, and remove what an interrupted upload or deletion left. Blocking."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in list(self._directory.glob("*.json")):
            try:
                file = msgspec.json.decode(path.read_bytes(), type=File)
                whole = self.path(file.id).stat().st_size == file.bytes
            except (OSError, msgspec.MsgspecError) as error:
                _log.error("a file's record cannot be read", path=path.name, error=str(error))
                continue
            if not whole:
                _log.error("a file is not what its record says", id=file.id)
                continue
            self._known[file.id] = file
            self._space.used += file.bytes
        for path in (*self._directory.glob("*.data"), *self._directory.glob("*.new")):
            if path.suffix == ".new" or path.stem not in self._known:
                path.unlink(missing_ok=True)

    def path(self, id: str) -> Path:
        """Where its bytes are."""
        return self._directory / f"{id}.data"

    def get(self, id: str, tenant: str, param: str = "id") -> File:
        """The tenant's file of that name. Raises BatonError(NOT_FOUND)."""
        file = self._known.get(id)
        if file is None or file.tenant != tenant or file.over(time.time()):
            raise BatonError(Reason.NOT_FOUND, f"No such File object: {id[:80]}", param=param)
        return file

    def all(self, tenant: str) -> list[File]:
        """Every file of the tenant, newest first."""
        now = time.time()
        there = (file for file in self._known.values() if file.tenant == tenant and not file.over(now))
        # Sorting keeps the order in which those of the same second came.
        return sorted(there, key=lambda file: file.created)[::-1]

    def upload(self, tenant: str) -> Upload:
        """A new file of the tenant's, to be written; `close` on every path.

        Raises BatonError: NO_CAPACITY, STORAGE_FULL.
        """
        if self._uploads >= UPLOADS_AT_ONCE:
            raise BatonError(Reason.NO_CAPACITY, "This server is taking other files in; try again soon.")
        if len(self._known) >= MAX_FILES:
            raise BatonError(Reason.STORAGE_FULL, f"There are {MAX_FILES} files already: delete some that you have.")
        try:
            upload = Upload(self, new_id("file-"), tenant, self._max_bytes)
        except OSError as error:
            raise storage_full(error) from error
        self._uploads += 1
        return upload

    async def delete(self, id: str, tenant: str) -> None:
        """Remove a file of the tenant's. Raises BatonError: NOT_FOUND, FILE_IN_USE."""
        file = self.get(id, tenant)
        if batch := self.in_use(id):
            raise BatonError(Reason.FILE_IN_USE, f"{id} is needed by {batch}: cancel that first.", param="id")
        try:
            await self._drop(file)
        except OSError as error:
            raise storage_full(error) from error

    async def expire(self) -> int:
        """Remove the files whose time has passed, but for those that a batch needs; how many."""
        now = time.time()
        late = [file for file in self._known.values() if file.over(now) and not self.in_use(file.id)]
        removed = 0
        for file in late:
            try:
                await self._drop(file)
            except OSError as error:  # it is tried again
                _log.error("a file whose time has passed could not be removed", id=file.id, error=str(error))
            else:
                removed += 1
        return removed

    async def _drop(self, file: File) -> None:
        """Raises OSError: it stays."""
        if self._known.pop(file.id, None) is None:
            return
        try:
            await to_end(self._remove, file.id)
        except OSError:
            self._known[file.id] = file
            raise
        self._space.give_back(file.bytes)

    def _remove(self, id: str) -> None:
        self._record(id).unlink(missing_ok=True)
        sync_names(self._directory)
        self.path(id).unlink(missing_ok=True)

    def adopt(self, source: Path, id: str, tenant: str, filename: str, expires_after: int | None) -> File:
        """Make what a batch wrote a file of its tenant's (its bytes are counted already), for so many seconds if any.
        Blocking, may be repeated; raises OSError."""
        if id in self._known:
            return self._known[id]
        with contextlib.suppress(FileExistsError):
            os.link(source, self.path(id))
        digest, lines, size = hashlib.sha256(), 0, 0
        with source.open("rb") as data:
            while piece := data.read(1 << 20):
                digest.update(piece)
                lines += piece.count(b"\n")
                size += len(piece)
        now = int(time.time())
        expires = None if expires_after is None else now + expires_after
        return self._keep(File(id, size, now, filename, RESULT, digest.hexdigest(), lines, expires, tenant))

    def _keep(self, file: File) -> File:
        write_whole(self._record(file.id), msgspec.json.encode(file))
        self._known[file.id] = file
        return file

    def _record(self, id: str) -> Path:
        return self._directory / f"{id}.json"


class Upload:
    """A file that is being written."""

    def __init__(self, files: Files, id: str, tenant: str, max_bytes: int) -> None:
        self.id = id
        self._tenant = tenant
        self._files = files
        self._max_bytes = max_bytes
        self._size = 0
        self._lines = 0
        self._digest = hashlib.sha256()
        self._file = files.path(id).open("wb")

    async def write(self, data: bytes) -> None:
        """Append. Raises BatonError: REQUEST_TOO_LARGE, STORAGE_FULL."""
        if self._size + len(data) > self._max_bytes:
            message = f"A file may have {self._max_bytes} bytes."
            raise BatonError(Reason.REQUEST_TOO_LARGE, message, param="file")
        self._files._space.take(len(data))
        self._size += len(data)
        try:
            await asyncio.to_thread(self._write, data)
        except OSError as error:
            raise storage_full(error) from error

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._lines += data.count(b"\n")
        self._file.write(data)

    async def keep(self, filename: str, purpose: str, expires_after: int = DEFAULT_S) -> File:
        """It is complete, and stays for so many seconds. Raises BatonError."""
        now, sha256 = int(time.time()), self._digest.hexdigest()
        expires = now + expires_after
        made = File(self.id, self._size, now, filename, purpose, sha256, self._lines, expires, self._tenant)
        try:
            return await to_end(self._keep, made)
        except OSError as error:
            raise storage_full(error) from error

    def _keep(self, made: File) -> File:
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._files._keep(made)

    def close(self) -> None:
        """Drop it unless it was kept."""
        self._files._uploads -= 1
        with contextlib.suppress(OSError):  # what is still to be flushed may not fit
            self._file.close()
        if self.id not in self._files._known:
            self._files.path(self.id).unlink(missing_ok=True)
            self._files._space.give_back(self._size)
