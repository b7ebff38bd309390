"""A page of shared memory with the engine's live state: the worker reads it without asking, an idle engine is silent."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import astuple, fields

from baton.engine.port import EngineStats

_FIELDS = fields(EngineStats)
_PAGE = struct.Struct(f"<Q{len(_FIELDS)}dQ")
_CASTS = [float if f.type in (float, "float") else int for f in _FIELDS]
_TRIES = 100


class StatsPage:
    """One writer, many readers. A counter before and after tells a reader that it met a write in the middle."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        self._version = 0
        self._last = EngineStats()

    @classmethod
    def create(cls) -> StatsPage:
        """A new page, all zero."""
        fd = os.memfd_create("baton-engine-stats", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(fd)

    def write(self, stats: EngineStats) -> None:
        """Publish. Only the engine process does."""
        self._version += 1
        self._map[: _PAGE.size] = _PAGE.pack(self._version, *map(float, astuple(stats)), self._version)

    def read(self) -> EngineStats:
        """The last published state."""
        for _ in range(_TRIES):
            before, *values, after = _PAGE.unpack(self._map[: _PAGE.size])
            if before == after:
                self._last = EngineStats(*(cast(v) for cast, v in zip(_CASTS, values, strict=True)))  # type: ignore[arg-type]
                break
        return self._last
