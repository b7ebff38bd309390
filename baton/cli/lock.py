"""One process at a time makes something that all use; the others wait and find it made."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Hold the right to make what goes into `folder`, which is created. The kernel gives it back when a holder dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
