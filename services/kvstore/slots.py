"""What the host tier keeps of a slot: room that is being filled, then a sealed block with its handle and pins."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from baton.kv.handle import Handle
from services.kvstore.tier import Facts


@dataclass
class Slot:
    """Room for one block that is being filled: where, under which generation, on whose quota. What was cleared while it
    was on its way is not sealed."""

    number: int
    offset: int
    generation: int
    tenant: str = ""
    cleared: bool = False


@dataclass
class Entry:
    """One sealed block. `handle` names it to readers, `pins` counts who holds it; a condemned one is in no index.
    `used` is `time.monotonic()` of the last use."""

    slot: Slot
    handle: Handle
    facts: Facts
    pins: int = 0
    condemned: bool = False
    used: float = field(default_factory=time.monotonic)
