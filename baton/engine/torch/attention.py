"""Attention over paged KV: which blocks each query row sees is worked out once a step, not once a layer.

Sequences are computed in groups of like shape. A group's blocks are gathered to dense keys and values
[sequences, kv_heads, positions, head_dim], shorter ones padded, and its queries stand as rows of their KV head
[sequences, kv_heads, new tokens x heads of the group, head_dim], so that keys are not copied for each query head.
Grouping keeps one long sequence from padding all the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.torch.batch import Batch, SequenceSlice
from baton.engine.torch.kvpool import KvPool

PADDING = 1.25
"""A group may read this many times the blocks that its sequences have..."""
SPARE_BLOCKS = 8
"""...or this many more: about what one more group costs in calls."""


def group_sequences(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Split sequences of (new tokens, blocks) into groups that are computed together; indices, each once.

    All of a group have the same number of new tokens, and padding them to the longest reads at most PADDING times, or
    SPARE_BLOCKS more than, the blocks that they have.
    """
    groups: list[list[int]] = []
    total = 0
    for index in sorted(range(len(shapes)), key=lambda i: shapes[i]):
        tokens, blocks = shapes[index]
        if groups and shapes[groups[-1][0]][0] == tokens:
            padded = (len(groups[-1]) + 1) * blocks  # sorted: this one is the longest
            if padded <= max(PADDING * (total + blocks), total + blocks + SPARE_BLOCKS):
                groups[-1].append(index)
                total += blocks
                continue
        groups.append([index])
        total = blocks
    return groups


@dataclass(frozen=True)
class _Group:
    """One group's indices. `rows` None: it is all of the batch, in order."""

    sequences: int
    tokens: int
    rows: Tensor | None
    keys: Tensor
    values: Tensor
    bias: Tensor
    """[sequences * kv_heads, new tokens x heads of the group, positions], 0 or minus infinity."""


class PagedAttention:
    """The attention of one batch, for each layer in turn: new KV is written to the pool, then all is read from it."""

    def __init__(self, batch: Batch, pool: KvPool, heads: int) -> None:
        self._pool = pool
        self._heads = heads
        self._kv_heads = pool.kv_heads
        self._device = pool.tensor.device
        self._fused = self._device.type != "cpu"
        self._write = self._write_index(batch)
        self._groups = self._make_groups(batch)
        # A layer's rows are those of layer 0, further on: one index serves all layers through shifted views.
        self._positions = pool.tensor.view(-1, pool.head_dim)
        self._blocks = pool.tensor.view(-1, pool.block_size * pool.head_dim)

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """`query` [rows, heads, head_dim] and `key_value` [rows, 2 * kv_heads, head_dim] (keys first), both after RoPE,
        to [rows, heads * head_dim]."""
        pool = self._pool
        first = layer * 2 * self._kv_heads
        self._positions[first * pool.block_size :].index_copy_(0, self._write, key_value.reshape(-1, pool.head_dim))
        blocks = self._blocks[first:]
        if self._groups[0].rows is None:
            return self._attend(self._groups[0], query, blocks)
        out = torch.empty(query.shape[0], self._heads * pool.head_dim, dtype=query.dtype, device=query.device)
        for group in self._groups:
            assert group.rows is not None
            out.index_copy_(0, group.rows, self._attend(group, query.index_select(0, group.rows), blocks))
        return out

    def _attend(self, group: _Group, query: Tensor, blocks: Tensor) -> Tensor:
        n, tokens, kv_heads, dim = group.sequences, group.tokens, self._kv_heads, self._pool.head_dim
        query = query.view(n, tokens, kv_heads, -1, dim).transpose(1, 2).reshape(n * kv_heads, -1, dim)
        keys = blocks.index_select(0, group.keys).view(n * kv_heads, -1, dim)
        if self._fused:
            values = blocks.index_select(0, group.values).view(n * kv_heads, -1, dim)
            out = functional.scaled_dot_product_attention(query[None], keys[None], values[None], group.bias[None])
        else:
            # On a CPU two products take a third of the fused kernel's time in bf16 (scores are rounded to bf16 then, as
            # in transformers' eager attention) and no more in f32. Keys are dropped before values are gathered: half
            # the memory, and the nearer cache holds it.
            weights = torch.baddbmm(group.bias, query, keys.transpose(1, 2), alpha=1.0 / math.sqrt(dim)).softmax(-1)
            del keys
            out = torch.bmm(weights, blocks.index_select(0, group.values).view(n * kv_heads, -1, dim))
        return out.view(n, kv_heads, tokens, -1, dim).transpose(1, 2).reshape(n * tokens, -1)

    def _write_index(self, batch: Batch) -> Tensor:
        """Pool positions of the new keys and values in layer 0: [rows * 2 * kv_heads]."""
        size = self._pool.block_size
        slots, offsets = [], []
        for s in batch.sequences:
            for position in range(s.start, s.end):
                slots.append(s.block_table[position // size])
                offsets.append(position % size)
        first = torch.tensor(slots) * (self._pool.layers * 2 * self._kv_heads)
        heads = first[:, None] + torch.arange(2 * self._kv_heads)
        return (heads * size + torch.tensor(offsets)[:, None]).flatten().to(self._device)

    def _make_groups(self, batch: Batch) -> list[_Group]:
        size = self._pool.block_size
        starts, row = [], 0
        for s in batch.sequences:
            starts.append(row)
            row += len(s.token_ids)
        members = group_sequences([(len(s.token_ids), -(-s.end // size)) for s in batch.sequences])
        whole = len(members) == 1
        if whole:
            members[0].sort()
        return [
            self._make_group([batch.sequences[i] for i in group], None if whole else [starts[i] for i in group])
            for group in members
        ]

    def _make_group(self, sequences: list[SequenceSlice], starts: list[int] | None) -> _Group:
        pool, size = self._pool, self._pool.block_size
        n, tokens = len(sequences), len(sequences[0].token_ids)
        blocks = max(-(-s.end // size) for s in sequences)
        # Padding repeats a sequence's own last block: finite numbers, masked.
        tables = torch.tensor([_padded(s.block_table[: -(-s.end // size)], blocks) for s in sequences])
        first = tables.view(n, 1, blocks) * (pool.layers * 2 * self._kv_heads)
        keys = (first + torch.arange(self._kv_heads)[:, None]).flatten().to(self._device)
        seen = torch.tensor([s.start for s in sequences])[:, None] + torch.arange(1, tokens + 1)
        hidden = torch.arange(blocks * size) >= seen[..., None]
        bias = torch.zeros(hidden.shape, dtype=pool.tensor.dtype).masked_fill_(hidden, float("-inf"))
        bias = bias.repeat_interleave(self._heads // self._kv_heads, 1)[:, None]
        bias = bias.expand(-1, self._kv_heads, -1, -1).flatten(0, 1)
        rows = None
        if starts is not None:
            rows = (torch.tensor(starts)[:, None] + torch.arange(tokens)).flatten().to(self._device)
        return _Group(n, tokens, rows, keys, keys + self._kv_heads, bias.to(self._device))


def _padded(table: Sequence[int], length: int) -> list[int]:
    return [*table, *[table[-1]] * (length - len(table))]


def opened_slots(batch: Batch, block_size: int) -> list[int]:
    """Slots that get their first position in this pass and are not filled by it: what they held must be cleared, since
    a masked position still takes part in the arithmetic, and NaN times zero is NaN."""
    opened = []
    for s in batch.sequences:
        last = (s.end - 1) // block_size
        if s.end % block_size and s.start <= last * block_size:
            opened.append(s.block_table[last])
    return opened
