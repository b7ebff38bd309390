"""The one long-lived stretch of host memory that holds a process's KV blocks.

A memfd, so that the worker process (transport, checksums) and its engine process map the same pages. It is mapped once
and never unmapped while the process lives: a one-sided read by a peer may arrive at any time, and a read of
unmapped pages crashes the owner under UCX over TCP.

Every page is there from the start, in both processes: measured, the first write to 23 MB (a prompt of 1,000 tokens)
takes 28 ms when the kernel has to find and clear the pages and 2.5 ms when it has not, and the first use in a second
mapping takes 10 ms. In mid-stream that is a late token, and where the machine has no memory left, a crash.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 on; not among Python's names yet."""


class Arena:
    """`size` bytes of shared memory. `fd` can be passed to a child, which opens it with `Arena.attach`."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel: pages come as they are used
                raise
        self.buffer = memoryview(self._map)
        """The whole arena, writable, as bytes."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        """Its address in this process, for registration with a transport."""

    @classmethod
    def create(cls, size: int, name: str = "baton-kv") -> Arena:
        """A new zeroed arena of `size` bytes. Raises OSError when the memory cannot be had."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map an arena that another process created, by its inherited descriptor."""
        return cls(fd, os.fstat(fd).st_size)

    @classmethod
    def over(cls, address: int, size: int) -> Arena:
        """Memory of somebody else's in this process, who keeps it mapped for as long as the process lives. No `fd`."""
        arena = cls.__new__(cls)
        arena.fd = -1
        arena.size = size
        arena.buffer = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        arena.address = address
        return arena

    def view(self, offset: int, length: int) -> memoryview:
        """`length` bytes from `offset`, writable, no copy. Raises ValueError when outside the arena."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"[{offset}, {offset + length}) is outside the arena of {self.size} bytes")
        return self.buffer[offset : offset + length]
