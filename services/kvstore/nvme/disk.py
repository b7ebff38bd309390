"""The file below the tier: whole aligned reads and writes, and nothing else, so that a test can break it.

O_DIRECT where the file system takes it: the page cache would double the memory and hide the disk's speed. Where it is
refused, ordinary I/O with the pages given back afterwards, for which what was written has to be on the disk. Otherwise
no fsync: a torn or lost block is a miss, never an error, and what a killed process has written the kernel still has.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import fcntl
import os
from pathlib import Path

from services.kvstore.aligned import ALIGN, aligned_buffer
from services.kvstore.nvme.slab import is_slab


class Disk(abc.ABC):
    """Offsets, lengths and buffers are aligned. Any thread; every call may take as long as the medium likes."""

    size: int
    was: int
    """Bytes that there were when it was opened; 0: it is new."""
    direct: bool

    @abc.abstractmethod
    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`. Raises OSError, also when the file ends before."""

    @abc.abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`. Raises OSError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of it."""


class SlabFile(Disk):
    """`slab` in a folder that no other store has, preallocated to `size` bytes.

    Raises OSError: ENOSPC without room for all of it (then nothing stays allocated), EBUSY when another store has the
    folder, EEXIST when the file is not a store's (then it is left as it is), and whatever the file system says.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size // ALIGN * ALIGN
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._fd = -1
        try:
            self._take_lock(folder)
            self._open(folder / "slab")
        except OSError:
            self.close()
            raise

    def _take_lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, f"another store uses {folder}") from None

    def _open(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self.was = os.fstat(self._fd).st_size
        if self.was and not is_slab(os.pread(self._fd, ALIGN, 0)):
            raise OSError(errno.EEXIST, f"{path} is no store's: it is left as it is")
        try:
            os.posix_fallocate(self._fd, 0, self.size)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.was)
            raise
        os.ftruncate(self._fd, self.size)
        self.direct = self._try_direct(path, flags)

    def _try_direct(self, path: Path, flags: int) -> bool:
        """Reopen with O_DIRECT if a read goes through: some file systems refuse at open, some at the first read."""
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            return False
        try:
            os.preadv(fd, [aligned_buffer(ALIGN)], 0)
        except OSError:
            os.close(fd)
            return False
        os.close(self._fd)
        self._fd = fd
        return True

    def read(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, f"the slab ends at {offset + done}")
            done += count
        self._give_pages_back(offset, len(into))

    def write(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwritev(self._fd, [data[done:]], offset + done)
        if not self.direct:
            os.fdatasync(self._fd)  # the kernel keeps pages that are not on the disk yet, whatever it is advised
        self._give_pages_back(offset, len(data))

    def _give_pages_back(self, offset: int, length: int) -> None:
        if not self.direct:
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1
