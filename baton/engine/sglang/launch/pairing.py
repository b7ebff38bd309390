"""One request as SGLang's prefill and decode servers take it together. Pure.

Both get the same body with the same three fields: where the prefill server's bootstrap service is, and a *room*, a
number by which the two halves of the request find each other. Decode allocates pages and tells prefill in that room;
prefill pushes the KV there; the tokens come from decode (SGLang 0.5.23, `PDRoutingFields`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROOM_BITS = 63
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@dataclass(frozen=True)
class Bootstrap:
    """Where a prefill server's bootstrap service listens, as the decode server reaches it."""

    host: str
    port: int


def new_room(source: random.Random) -> int:
    """A room nobody else is in: 63 random bits and never 0, which SGLang takes for a transfer that has not begun."""
    return source.getrandbits(ROOM_BITS) or 1


def paired(body: Mapping[str, Any], bootstrap: Bootstrap, room: int) -> dict[str, Any]:
    """The body for both servers. Raises ValueError that names a field which only we may set."""
    for name in FIELDS:
        if body.get(name) is not None:
            raise ValueError(f"{name} is set by the pair")
    if not 0 < room < 1 << ROOM_BITS:
        raise ValueError(f"a room has {ROOM_BITS} bits and is not 0, not {room}")
    return {
        **body,
        "bootstrap_host": bootstrap.host,
        "bootstrap_port": bootstrap.port,
        "bootstrap_room": room,
    }
