"""The forward pass: token ids in, KV into the pool, logits out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.torch.attention import PagedAttention, opened_slots
from baton.engine.torch.batch import Batch
from baton.engine.torch.config import ModelConfig
from baton.engine.torch.kvpool import KvPool
from baton.engine.torch.rope import inverse_frequencies, rotate, rotation
from baton.engine.torch.weights import LayerWeights, Weights


class GivenUp(Exception):
    """A forward pass that ended between two layers, because nobody waits for it any more."""


def _always() -> bool:
    return True


class Model:
    """A Llama, Qwen2 or Qwen3 decoder over a paged KV pool. One caller at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, pool: KvPool) -> None:
        shape = (config.layers, config.kv_heads, config.head_dim)
        if (pool.layers, pool.kv_heads, pool.head_dim) != shape or pool.tensor.dtype != weights.embedding.dtype:
            raise ValueError("the KV pool was made for another model or dtype")
        self.config = config
        self.weights = weights
        self.pool = pool
        self._device = weights.embedding.device
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._frequencies = frequencies.to(self._device)

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch: its new KV is in the pool afterwards. Returns float32 logits [wanted rows, vocab], in the
        order of the batch's sequences and, within one, of positions."""
        return self.forward_and_sum(batch)[0]

    def forward_and_sum(self, batch: Batch, wanted: Callable[[], bool] = _always) -> tuple[Tensor, list[Tensor]]:
        """As `forward`; and for each sequence that wants it, in order, the float32 sum [hidden] of the last hidden
        states (after the final norm) of its new positions.

        `wanted` is asked before each layer. Raises GivenUp when it says no: the KV of the batch's new positions is then
        that of no model, and must be computed before anybody reads it.
        """
        with torch.inference_mode():
            x = self._hidden(batch, wanted)
            rows = torch.tensor(_wanted(batch), dtype=torch.long, device=self._device)
            logits = self.weights.head(self._norm(x.index_select(0, rows), self.weights.norm)).to(torch.float32)
            sums = [self._norm(x[part], self.weights.norm).to(torch.float32).sum(0) for part in _summed(batch)]
            return logits, sums

    def _hidden(self, batch: Batch, wanted: Callable[[], bool]) -> Tensor:
        ids = [token for s in batch.sequences for token in s.token_ids]
        positions = [p for s in batch.sequences for p in range(s.start, s.end)]
        self.pool.zero(opened_slots(batch, self.pool.block_size))
        attention = PagedAttention(batch, self.pool, self.config.heads)
        turn = rotation(torch.tensor(positions, device=self._device), self._frequencies)
        x = functional.embedding(torch.tensor(ids, device=self._device), self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            if not wanted():
                raise GivenUp
            x = self._layer(index, layer, x, turn, attention)
        return x

    def _layer(
        self, index: int, weights: LayerWeights, x: Tensor, turn: tuple[Tensor, Tensor], attention: PagedAttention
    ) -> Tensor:
        config = self.config
        turned = config.heads + config.kv_heads
        qkv = weights.qkv(self._norm(x, weights.input_norm)).view(x.shape[0], turned + config.kv_heads, config.head_dim)
        qk = qkv[:, :turned]
        if weights.qk_norm is not None:
            qk = functional.rms_norm(qk, (config.head_dim,), None, config.rms_eps) * weights.qk_norm
        qkv[:, :turned] = rotate(qk, turn)
        seen = attention(index, qkv[:, : config.heads], qkv[:, config.heads :])
        x = x + weights.out(seen)
        gate_up = weights.gate_up(self._norm(x, weights.post_norm))
        gate, up = gate_up[:, : config.intermediate], gate_up[:, config.intermediate :]
        return x + weights.down(functional.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (self.config.hidden,), weight, self.config.rms_eps)


def _wanted(batch: Batch) -> list[int]:
    """Rows whose logits are wanted."""
    rows: list[int] = []
    end = 0
    for s in batch.sequences:
        start, end = end, end + len(s.token_ids)
        if s.logits == "all":
            rows += range(start, end)
        elif s.logits == "last":
            rows.append(end - 1)
    return rows


def _summed(batch: Batch) -> list[slice]:
    """Rows of each sequence whose hidden states are summed."""
    rows: list[slice] = []
    end = 0
    for s in batch.sequences:
        start, end = end, end + len(s.token_ids)
        if s.summed:
            rows.append(slice(start, end))
    return rows
