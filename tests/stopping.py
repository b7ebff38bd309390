"""SIGSTOP that has happened when the call returns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

HANG_S = 30.0


def stop(pid: int) -> None:
    """Stop a process and wait until each of its threads stands: the signal is sent at once, but as long as none of them
    has taken it, one that computes or waits for a message may still do so. Fails when that takes HANG_S."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + HANG_S
    while not _stands(pid):
        assert time.monotonic() < end, f"{pid} does not stop"
        time.sleep(0.001)


def _stands(pid: int) -> bool:
    try:
        stats = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)
