"""Logical block keys: names for content, computable before any worker is chosen.

    key_0 = H(namespace)                 the root, no block
    key_i = H(key_{i-1} || tokens LE u32)   the i-th block

H is BLAKE2b with a 128-bit digest. `namespace` holds everything that changes the meaning of a token's KV: the
weights, the tokenizer, the adapter and the tenant's salt, so two tenants never share a key unless given one salt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

KEY_BYTES = 16
BLOCK_SIZE = 32
"""Tokens a logical key covers. Physical blocks may be larger by a whole factor: they use every k-th key."""


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def _le_u32(tokens: Sequence[int]) -> bytes:
    packed = array("I", tokens)
    if packed.itemsize != 4:  # pragma: no cover - no supported platform has another size
        raise OverflowError("array('I') is not 32 bits here")
    return packed.tobytes()


@dataclass(frozen=True)
class Namespace:
    """What must be equal for two equal token runs to have equal KV."""

    weights: str
    tokenizer: str
    adapter: str = ""
    salt: str = ""

    def root(self) -> bytes:
        """key_0 of every chain in this namespace (16 bytes). Parts are length-prefixed: no two can run together."""
        parts = (self.weights, self.tokenizer, self.adapter, self.salt)
        encoded = [p.encode() for p in parts]
        return _digest(b"baton-kv-v1" + b"".join(len(p).to_bytes(4, "little") + p for p in encoded))


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that follows `parent` and holds `tokens`; a partial last block is named the same way."""
    return _digest(parent + _le_u32(tokens))


def split_keys(packed: bytes) -> list[bytes]:
    """The keys that lie side by side in `packed`, as they travel in one field."""
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]


def block_keys(root: bytes, tokens: Sequence[int], block_size: int = BLOCK_SIZE) -> list[bytes]:
    """Keys of every *full* block of `tokens`, in order; `len(tokens) // block_size` of them.

    Raises OverflowError when a token does not fit in 32 bits.
    """
    packed = _le_u32(tokens)
    stride = block_size * 4
    keys: list[bytes] = []
    parent = root
    for start in range(0, len(packed) - stride + 1, stride):
        parent = _digest(parent + packed[start : start + stride])
        keys.append(parent)
    return keys
