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
_CASTS = [float if f.type in (float, "float") else int for f in _FIELDS]
_TRIES = 100


class StatsPage:
    """One writer, many readers. Version v says that body v mod 2 is whole; the next write goes to the other one, so a
    writer that is stopped in its middle leaves the last state to be read."""

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
        self._version += 1
        start = _body(self._version)
        self._map[start : start + _BODY.size] = _BODY.pack(*map(float, astuple(stats)), float(taken))
        self._map[: _VERSION.size] = _VERSION.pack(self._version)

    def read(self) -> tuple[EngineStats, int]:
        """The last published state, and how many messages the engine had taken then."""
        for _ in range(_TRIES):
            version = self._read_version()
            start = _body(version)
            body = self._map[start : start + _BODY.size]
            if self._read_version() == version:
                *numbers, taken = _BODY.unpack(body)
                values = [cast(v) for cast, v in zip(_CASTS, numbers, strict=True)]
                self._last = EngineStats(*values), int(taken)  # type: ignore[arg-type]
                break
        return self._last

    def _read_version(self) -> int:
        version: int = _VERSION.unpack(self._map[: _VERSION.size])[0]
        return version


def _body(version: int) -> int:
    """Where the body of that version begins."""
    return _VERSION.size + version % 2 * _BODY.size
