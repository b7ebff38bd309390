"""A directory of one process, and how much may lie in it.

What is written whole is written beside, synced, and renamed: it is there or it is not. A lock that dies with the
process keeps a second frontend off.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from baton.errors import BatonError, Reason

LOCK_S = 10.0
"""How long the frontend before us may take to leave."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


P = ParamSpec("P")
T = TypeVar("T")


async def to_end(work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """Do it in a thread, and wait for its end also when cancelled: who comes after us must find nothing half done."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **more))
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait([task])


async def lock(directory: Path) -> int:
    """Make the directory ours until the process ends; the lock's descriptor. Raises BatonError, OSError."""
    fd = await asyncio.to_thread(_open, directory)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOCK_S):
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return fd
                except BlockingIOError:
                    await asyncio.sleep(0.1)
    os.close(fd)
    raise BatonError(Reason.INVALID_REQUEST, f"--batch-dir {directory} is another frontend's: each needs its own")


def _open(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    return os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole, or as before, whatever happens. Raises OSError."""
    beside = path.with_name(f"{path.name}.new")
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_names(path.parent)


def sync_names(directory: Path) -> None:
    """What was created, renamed or removed there stays so. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def storage_full(error: OSError) -> BatonError:
    """What a client is told of a disk that does not take what it is given."""
    if error.errno in _FULL:
        return BatonError(Reason.STORAGE_FULL, "The disk of this server is full.")
    return BatonError(
        Reason.INTERNAL, f"The disk of this server failed ({errno.errorcode.get(error.errno or 0, '?')})."
    )


class Space:
    """How many bytes may be kept. Taken before they are written."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        """Raises BatonError(STORAGE_FULL)."""
        if self.used + size > self.limit:
            raise BatonError(
                Reason.STORAGE_FULL, f"Files and results may have {self.limit} bytes in all: delete some that you have."
            )
        self.used += size

    def give_back(self, size: int) -> None:
        """They are gone."""
        self.used -= size
