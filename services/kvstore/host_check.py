"""The host tier's leak check: every slot is in one place, what nobody holds may go, bytes match their sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from services.kvstore.eviction import Arc
from services.kvstore.slots import Entry

SUMS_CHECKED = 64
"""How many blocks' checksums are recomputed, drawn at random: all would stop the loop for too long."""


def findings(
    places: Sequence[int],
    total: int,
    entries: Mapping[bytes, Entry],
    condemned: Sequence[Entry],
    evictable: Arc,
    intact: Callable[[Entry], bool],
) -> list[str]:
    """In words; empty when sound. `places` are the slot numbers of everything that has one, free ones included."""
    found = []
    if sorted(places) != list(range(total)):
        found.append(f"host: {len(places)} places for {total} slots, {len(set(places))} different ones")
    unpinned = {key for key, entry in entries.items() if entry.pins == 0}
    if len(unpinned) != len(evictable) or any(key not in evictable for key in unpinned):
        found.append(f"host: {len(unpinned)} blocks are unpinned, {len(evictable)} are evictable")
    found += [f"host: a key leads to block {k.hex()}" for k, e in entries.items() if e.handle.key != k]
    found += [f"host: condemned block {e.handle.key.hex()} is held by nobody" for e in condemned if not e.pins]
    drawn = random.sample(list(entries.items()), min(SUMS_CHECKED, len(entries)))
    found += [f"host: block {key.hex()} does not match its checksum" for key, e in drawn if not intact(e)]
    return found
