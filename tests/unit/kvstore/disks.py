"""Disks that a test can break: a real slab file behind a switch."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

from services.kvstore.nvme.disk import Disk, SlabFile


class BreakableDisk(Disk):
    """Passes everything on; `fail` makes calls end with EIO, `stall` makes them wait until `go`."""

    def __init__(self, folder: Path, size: int) -> None:
        self._file = SlabFile(folder, size)
        self.size, self.was, self.direct = self._file.size, self._file.was, self._file.direct
        self.path = folder / "slab"
        self.fail = False
        self.tear_after: int | None = None
        """Writes this many bytes of the next write, then fails: what a kill leaves."""
        self.go = threading.Event()
        self.go.set()
        self.calls = 0

    def read(self, offset: int, into: memoryview) -> None:
        self._meet()
        self._file.read(offset, into)

    def write(self, offset: int, data: memoryview) -> None:
        self._meet()
        if self.tear_after is not None:
            self._file.write(offset, data[: self.tear_after])
            raise OSError(errno.EIO, "torn")
        self._file.write(offset, data)

    def close(self) -> None:
        self._file.close()

    def flip(self, offset: int) -> None:
        """Change one bit, behind the tier's back."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 4]))

    def _meet(self) -> None:
        self.calls += 1
        self.go.wait(60.0)
        if self.fail:
            raise OSError(errno.EIO, "Input/output error")
