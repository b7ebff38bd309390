"""When which stream lost which worker, as the frontends' logs tell it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import orjson

EVENT = "output moves"


@dataclass(frozen=True)
class Move:
    """A frontend has given a stream's worker up: when (`time.monotonic()`), and which."""

    at: float
    lost: str


def moves(logs: Iterable[Path]) -> dict[str, list[Move]]:
    """The moves of each stream by uid, in order. Lines that are no JSON are somebody else's."""
    started = time.time() - time.monotonic()
    found: dict[str, list[Move]] = defaultdict(list)
    for log in logs:
        for line in log.read_bytes().splitlines():
            if EVENT.encode() not in line:
                continue
            said = orjson.loads(line)
            at = datetime.fromisoformat(said["timestamp"]).timestamp() - started
            found[said["uid"]].append(Move(at, said["lost"]))
    return found
