"""Drive a `Model` by hand: prompts, chunks and greedy decoding over a pool of blocks in scattered order."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.torch.batch import Batch, Logits, SequenceSlice
from baton.engine.torch.config import load_config
from baton.engine.torch.kvpool import KvPool
from baton.engine.torch.model import Model
from baton.engine.torch.weights import load_weights

BLOCK = 32


def open_torch_model(
    path: Path, *, dtype: torch.dtype = torch.float32, slots: int = 64, fill: float = float("nan")
) -> Model:
    """The model over a pool whose bytes are `fill`: NaN shows every read of what was never written."""
    config = load_config(path)
    pool = KvPool(torch.zeros(slots * _block_bytes(path, dtype), dtype=torch.uint8), config, dtype, BLOCK)
    pool.tensor.fill_(fill)
    return Model(config, load_weights(path, config, dtype), pool)


def _block_bytes(path: Path, dtype: torch.dtype) -> int:
    config = load_config(path)
    return config.layers * 2 * config.kv_heads * BLOCK * config.head_dim * dtype.itemsize


class Run:
    """Sequences of one model, each with a block table of its own."""

    def __init__(self, model: Model, seed: int = 0) -> None:
        self.model = model
        self._free = list(range(model.pool.slots))
        random.Random(seed).shuffle(self._free)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def slice(self, name: str, ids: list[int], logits: Logits = "last") -> SequenceSlice:
        """The next tokens of a sequence, with blocks for them."""
        table, start = self.tables.setdefault(name, []), self.lengths.get(name, 0)
        while len(table) * BLOCK < start + len(ids):
            table.append(self._free.pop())
        self.lengths[name] = start + len(ids)
        return SequenceSlice(ids, start, list(table), logits)

    def step(self, *slices: SequenceSlice) -> Tensor:
        return self.model.forward(Batch(slices))

    def greedy(self, prompts: dict[str, list[int]], tokens: int, chunk: int = 1 << 30) -> dict[str, list[int]]:
        """Prefill every prompt in chunks, all together, then decode all together."""
        found: dict[str, list[int]] = {name: [] for name in prompts}
        left = dict(prompts)
        while any(len(ids) < tokens for ids in found.values()):
            slices = []
            for name in prompts:
                if left[name]:
                    part, left[name] = left[name][:chunk], left[name][chunk:]
                    slices.append((name, self.slice(name, part, "none" if left[name] else "last")))
                elif len(found[name]) < tokens:
                    slices.append((name, self.slice(name, found[name][-1:])))
            rows = iter(self.step(*(s for _, s in slices)).argmax(-1).tolist())
            for name, part in slices:
                if part.logits == "last":
                    found[name].append(next(rows))
        return found
