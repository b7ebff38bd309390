"""Children that live and die together: started in turn, each when the one before is ready; the first to end ends all.

A child dies with this process, however that dies (PR_SET_PDEATHSIG). SIGTERM and SIGINT go on to the children, last
started first. The exit code is that of the child which ended by itself, 0 when we were told to stop.
"""

from __future__ import annotations

import ctypes
import http.client
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

PR_SET_PDEATHSIG = 1
POLL_S = 0.2
PROBE_S = 5.0
GRACE_S = 30.0
"""From SIGTERM to SIGKILL: what a worker of ours needs to drain."""


@dataclass(frozen=True)
class Child:
    """A process. `ready_url` answers 200 when it can be used ("" = at once), within `ready_s` seconds."""

    name: str
    command: Sequence[str]
    ready_url: str = ""
    ready_s: float = 1800.0
    environment: Mapping[str, str] | None = field(default=None, compare=False)


class Supervisor:
    """Runs children. For the main thread of a process that does nothing else."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._running: list[tuple[Child, subprocess.Popen[bytes]]] = []
        self._told = False

    def run(self) -> int:
        """Until one ends or we are told to; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            for child in self._children:
                self._start(child)
                if (code := self._wait_ready(child)) is not None:
                    return code
            while True:
                if (code := self._ended()) is not None:
                    return code
                time.sleep(POLL_S)
        finally:
            self._stop()

    def _start(self, child: Child) -> None:
        environment = dict(child.environment) if child.environment is not None else None
        # preexec_fn is safe here: this process has one thread.
        process = subprocess.Popen(child.command, stdin=subprocess.DEVNULL, env=environment, preexec_fn=_die_with_us)
        self._running.append((child, process))
        _say(f"{child.name}: started, pid {process.pid}")

    def _wait_ready(self, child: Child) -> int | None:
        """None when it is ready; an exit code when one ended or the time is over."""
        if not child.ready_url:
            return self._ended()
        end = time.monotonic() + child.ready_s
        while not _answers(child.ready_url):
            if (code := self._ended()) is not None:
                return code
            if time.monotonic() > end:
                _say(f"{child.name}: not ready after {child.ready_s:g} s ({child.ready_url})")
                return 1
            time.sleep(POLL_S)
        _say(f"{child.name}: ready")
        return None

    def _ended(self) -> int | None:
        """The exit code to leave with, if it is time to."""
        if self._told:
            return 0
        for child, process in self._running:
            if (code := process.poll()) is not None:
                _say(f"{child.name}: ended with {code}")
                return code if code >= 0 else 128 - code
        return None

    def _stop(self) -> None:
        for _, process in reversed(self._running):
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(GRACE_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told = True


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PROBE_S) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: we pass on SIGTERM, in order


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
