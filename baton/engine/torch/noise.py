"""The noise of sampling: a pure function of (seed, choice, output index), equal in every process, on every device."""

from __future__ import annotations

import hashlib
import struct

_COUNTER = struct.Struct("<QQQ")
_MASK = (1 << 64) - 1


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) for output token `index` of `choice`: 52 bits of a BLAKE2b hash of the counters.

    A seed counts modulo 2**64. With 52 bits, not 53, its product with a positive float64 is always less than that.
    """
    counter = _COUNTER.pack(seed & _MASK, choice, index)
    digest = hashlib.blake2b(counter, digest_size=8, person=b"baton-noise").digest()
    return (int.from_bytes(digest, "little") >> 12) / (1 << 52)
