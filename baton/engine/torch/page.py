"""A page of shared memory with the engine's live state: a worker reads it without asking, an idle engine is silent."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import astuple, fields

from baton.engine.port import EngineStats

_FIELDS = fields(EngineStats)
_VERSION = struct.Struct("<Q")
_BODY = struct.Struct(f"<{len(_FIELDS) + 1}d")
"""The stats, and how many messages the engine has taken."""
_END = _VERSION.size + _BODY.size
_CASTS = [float if f.type in (float, "float") else int for f in _FIELDS]
_TRIES = 100


class StatsPage:
    """One writer, many readers. The version is odd during a write, and equal before and after a good read."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        self._version = 0
        self._last = EngineStats(), 0

    @classmethod
    def create(cls) -> StatsPage:
        """A new page, all zero."""
        fd = os.memfd_create("baton-engine-stats", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(fd)

    def write(self, stats: EngineStats, taken: int = 0) -> None:
        """Publish. Only the engine process does. `taken`: messages it has taken so far."""
        self._set_version(self._version + 1)
        self._map[_VERSION.size : _END] = _BODY.pack(*map(float, astuple(stats)), float(taken))
        self._set_version(self._version + 1)

    def _set_version(self, version: int) -> None:
        self._version = version
        self._map[: _VERSION.size] = _VERSION.pack(version)

    def read(self) -> tuple[EngineStats, int]:
        """The last published state, and how many messages the engine had taken then."""
        for _ in range(_TRIES):
            before = self._map[: _VERSION.size]
            body = self._map[_VERSION.size : _END]
            if before == self._map[: _VERSION.size] and _VERSION.unpack(before)[0] % 2 == 0:
                *numbers, taken = _BODY.unpack(body)
                values = [cast(v) for cast, v in zip(_CASTS, numbers, strict=True)]
                self._last = EngineStats(*values), int(taken)  # type: ignore[arg-type]
                break
        return self._last
