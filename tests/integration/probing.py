"""Asks a frontend's probes over and over, from a process of its own: `python -m tests.integration.probing URL`.

Each line on stdin ends it and gets one JSON object: for each path, how often it was asked, how long it took, and how
often it was answered with 503, as `/ready` may be.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = ("/health", "/ready", "/metrics")
EVERY_S = 0.02
HANG_S = 120.0


@contextlib.contextmanager
def probing(url: str, what: str) -> Iterator[dict[str, dict[str, float]]]:
    """Probe meanwhile; what was measured is in the dictionary afterwards, in milliseconds, and printed."""
    command = [sys.executable, "-m", "tests.integration.probing", url.removeprefix("http://")]
    found: dict[str, dict[str, float]] = {}
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield found
            output, _ = process.communicate(b"\n", timeout=HANG_S)
            found |= json.loads(output)
        finally:
            process.kill()
    print(f"{what}:", "; ".join(f"{path} {_told(times)}" for path, times in found.items()))


def _told(times: dict[str, float]) -> str:
    refused = f", {times['unready']:.0f} answered with 503" if times["unready"] else ""
    return f"{times['n']:.0f} asked, ms p50 {times['p50']:.1f} p99 {times['p99']:.1f} max {times['max']:.1f}{refused}"


def main() -> None:
    """Probe until told to end."""
    connection = http.client.HTTPConnection(sys.argv[1], timeout=HANG_S)
    taken: dict[str, list[float]] = {path: [] for path in PATHS}
    unready = dict.fromkeys(PATHS, 0)
    print("probing", flush=True)
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        for path, times in taken.items():
            began = time.monotonic()
            connection.request("GET", path)
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status == 200 or (path, answer.status) == ("/ready", 503), (path, answer.status, said)
            unready[path] += answer.status != 200
            times.append((time.monotonic() - began) * 1000)
    print(json.dumps({path: {**_summary(sorted(times)), "unready": unready[path]} for path, times in taken.items()}))


def _summary(times: list[float]) -> dict[str, float]:
    n = len(times)
    return {"n": n, "p50": times[n // 2], "p99": times[min(n - 1, n * 99 // 100)], "max": times[-1]}


if __name__ == "__main__":
    main()
