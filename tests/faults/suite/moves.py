"""When which stream lost which worker, and what it then waited for, as the frontends' logs tell it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

PARTS = ("detect", "place", "token")
"""See `baton_frontend_resume_seconds`."""


@dataclass(frozen=True)
class Move:
    """A frontend has given a stream's worker up: when (`time.monotonic()`), which, why, and what it cost by part, if
    the worker that took the stream then gave a token."""

    at: float
    frontend: str
    lost: str
    error: str
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.seconds.items()) or "lost again"
        return f"{self.error}: {parts}"


def moves(logs: Iterable[Path]) -> dict[str, list[Move]]:
    """The moves of each stream by uid, in order. Lines that are no JSON are somebody else's."""
    started = time.time() - time.monotonic()
    found: dict[str, list[Move]] = defaultdict(list)
    for log in logs:
        for line in log.read_bytes().splitlines():
            if b"output moves" in line:
                said: dict[str, Any] = orjson.loads(line)
                at = datetime.fromisoformat(said["timestamp"]).timestamp() - started
                found[said["uid"]].append(Move(at, said["id"], said["lost"], said["error"]))
            elif b"output resumed" in line:
                said = orjson.loads(line)
                for move in found[said["uid"]][-1:]:
                    move.seconds.update({part: said[part] for part in PARTS if part in said})
    return found
