"""How a block's bytes lie. Only equal fingerprints pair."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class LayoutFingerprint:
    """The physical shape of one block: `[layers, 2 (K, V), kv_heads, block_size, head_dim]`, contiguous.

    `model` is the weights' identity: equal shapes of different models never pair. `order` names the axis order.
    `variant` is what else decides what the bytes mean (an engine's version, speculative decoding); mostly empty.
    The wire version is not part of it: releases N and N-1 must pair during a rolling upgrade.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    quantisation: str = "none"
    order: str = "lkhtd"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    variant: str = ""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        per_token = self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return per_token * self.block_size

    def digest(self) -> str:
        """A short name that is equal exactly when every field is equal."""
        # Without a variant the digest is that of releases that knew none.
        said = {k: v for k, v in asdict(self).items() if k != "variant" or v}
        text = "|".join(f"{k}={v}" for k, v in sorted(said.items()))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def differences(self, other: LayoutFingerprint) -> list[str]:
        """`field: ours != theirs` for each field that differs; empty when the two pair."""
        return [
            f"{f.name}: {getattr(self, f.name)} != {getattr(other, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
