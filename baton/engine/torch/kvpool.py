"""The engine's KV blocks as one tensor over the arena's bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.torch.config import ModelConfig


class KvPool:
    """`tensor` is [slots, layers, 2 (K, V), kv_heads, block_size, head_dim], contiguous: one slot is one stretch of
    `block_bytes` bytes, which is what travels between engines.

    `buffer` is the memory itself (bytes of an arena, or a uint8 tensor); a rest smaller than a block is left alone.
    Raises ValueError when not one block fits.
    """

    def __init__(
        self,
        buffer: memoryview | torch.Tensor,
        config: ModelConfig,
        dtype: torch.dtype,
        block_size: int = 32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        self.layers, self.kv_heads, self.head_dim = config.layers, config.kv_heads, config.head_dim
        shape = (config.layers, 2, config.kv_heads, block_size, config.head_dim)
        self.block_bytes = torch.Size(shape).numel() * dtype.itemsize
        raw = buffer if isinstance(buffer, torch.Tensor) else torch.frombuffer(buffer, dtype=torch.uint8)
        self.slots = raw.numel() // self.block_bytes
        if self.slots == 0:
            raise ValueError(f"{raw.numel()} bytes hold no KV block of {self.block_bytes} bytes")
        whole = raw.flatten()[: self.slots * self.block_bytes]
        self.tensor = whole.view(dtype).view(self.slots, *shape)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy a whole block."""
        self.tensor[dst].copy_(self.tensor[src])

    def zero(self, slots: Sequence[int]) -> None:
        """Clear whole blocks."""
        for slot in slots:
            self.tensor[slot].zero_()

    def zero_tail(self, slot: int, tokens: int) -> None:
        """Zero the positions from `tokens` on, so that equal prefixes give equal bytes."""
        self.tensor[slot, :, :, :, tokens:].zero_()
