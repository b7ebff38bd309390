"""What one thread does with one slot. `buffer` is aligned memory: a header's room, then the payload's."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from baton.kv.keys import KEY_BYTES
from services.kvstore.aligned import ALIGN
from services.kvstore.nvme.disk import Disk
from services.kvstore.nvme.slab import (
    EMPTY,
    FILLING,
    SEALED,
    Header,
    payload_sum,
    read_header,
    slot_bytes,
    slot_offset,
    write_header,
)
from services.kvstore.tier import BlockShape, Facts

_ERASED = Header(EMPTY, 0, 0, bytes(KEY_BYTES), 0, Facts(), 0)


@dataclass(frozen=True)
class Place:
    """A slot of a slab of one shape and era."""

    shape: BlockShape
    era: int
    slot: int

    @property
    def offset(self) -> int:
        """Where it begins on the disk."""
        return slot_offset(self.slot, self.shape)

    @property
    def size(self) -> int:
        """The bytes of the slot, and of the buffer for it."""
        return slot_bytes(self.shape)

    def payload(self, buffer: memoryview) -> memoryview:
        """The block's bytes in a buffer."""
        return buffer[ALIGN : ALIGN + self.shape.block_bytes]


def write_slot(disk: Disk, place: Place, key: bytes, generation: int, facts: Facts, buffer: memoryview) -> int:
    """Write the payload that lies in `buffer`, then seal it; the payload's sum. Raises OSError."""
    digest = payload_sum(key, place.era, generation, place.payload(buffer))
    header = Header(FILLING, place.era, generation, key, place.shape.block_bytes, facts, digest)
    write_header(header, buffer)
    disk.write(place.offset, buffer)
    write_header(replace(header, state=SEALED), buffer)
    disk.write(place.offset, buffer[:ALIGN])
    return digest


def read_slot(disk: Disk, place: Place, key: bytes, generation: int, digest: int, buffer: memoryview) -> bool:
    """Read a slot; whether it holds exactly this block. If not, its header is overwritten. Raises OSError."""
    disk.read(place.offset, buffer)
    header = read_header(buffer)
    expected = (SEALED, key, place.era, generation, digest, place.shape.block_bytes)
    if header is not None:
        found = (header.state, header.key, header.era, header.generation, header.digest, header.length)
        if found == expected and payload_sum(key, place.era, generation, place.payload(buffer)) == digest:
            return True
    with contextlib.suppress(OSError):
        erase_slot(disk, place, buffer)
    return False


def erase_slot(disk: Disk, place: Place, buffer: memoryview) -> None:
    """Overwrite the header: a restart finds nothing here. Raises OSError."""
    write_header(_ERASED, buffer)
    disk.write(place.offset, buffer[:ALIGN])
