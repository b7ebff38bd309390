"""The restart scan: what an earlier process left in the slab, told by headers alone.

Payloads are not read: a torn one fails its sum when it is first wanted. A slot that was being written when the process
was killed says FILLING; it is dropped and counted, as is a header whose own sum is wrong.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

from services.kvstore.aligned import ALIGN
from services.kvstore.medium_io import MediumIo, MediumUnavailable
from services.kvstore.nvme.disk import Disk
from services.kvstore.nvme.slab import EMPTY, SEALED, Header, Superblock, read_header, slot_offset

RETRIES = 5
RETRY_S = 1.0


@dataclass
class Scanned:
    """What was found, in slots: `blocks` are served again. `stale`: cleared, or their time is over."""

    blocks: int = 0
    torn: int = 0
    stale: int = 0
    unreadable: int = 0

    def counts(self) -> dict[str, int]:
        """By name."""
        return asdict(self)


async def read_headers(
    io: MediumIo, disk: Disk, superblock: Superblock, first: int, many: int, found: Scanned
) -> list[Header | None] | None:
    """The headers of `many` slots from `first`, None for those that hold no block of this era; counted in `found`.

    A disk that does not answer is asked again some times; after that there is None for all of them, and these slots are
    as empty.
    """

    def read(buffer: memoryview) -> list[tuple[bool, Header | None]]:
        headers = []
        for number in range(many):
            header = buffer[number * ALIGN : (number + 1) * ALIGN]
            disk.read(slot_offset(first + number, superblock.shape), header)
            headers.append((any(header[:8]), read_header(header)))
        return headers

    for _ in range(RETRIES):
        try:
            raw = await io.run(many * ALIGN, read)
            return [_judge(written, header, superblock, found) for written, header in raw]
        except MediumUnavailable:
            await asyncio.sleep(RETRY_S)
    found.unreadable += many
    return None


def _judge(written: bool, header: Header | None, superblock: Superblock, found: Scanned) -> Header | None:
    if header is None:
        found.torn += written
        return None
    if header.state == EMPTY:
        return None
    if header.era != superblock.era or header.facts.expired():
        found.stale += 1
        return None
    if header.state != SEALED or header.length != superblock.shape.block_bytes:
        found.torn += 1
        return None
    return header
