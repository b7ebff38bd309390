"""Memory and lengths as O_DIRECT wants them."""

from __future__ import annotations

import mmap

ALIGN = 4096
"""What O_DIRECT asks of address, offset and length, on every device that we know of."""


def aligned(size: int) -> int:
    """`size` rounded up to ALIGN."""
    return -(-size // ALIGN) * ALIGN


def aligned_buffer(size: int) -> memoryview:
    """Zeroed page-aligned memory of `size` bytes, rounded up."""
    return memoryview(mmap.mmap(-1, aligned(size)))
