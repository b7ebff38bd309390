"""Between staging slots and vLLM's KV cache, for one tensor-parallel rank: whole blocks, all layers.

A slot is `[rank, layer, *block]`: each rank's part is one stretch, and inside it each layer's block as vLLM keeps it.
On a CPU both sides are plain memory. On a GPU the arena is pinned, copies are queued on the compute stream (in order
with the model: nothing is overwritten before it was copied), and an event tells when a save has arrived.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def block_views(caches: Sequence[Tensor], blocks: int) -> list[Tensor]:
    """Each layer's cache with its block axis first. Raises ValueError for a layer that has no single such axis, or
    another shape than the first: what is not whole blocks of plain K and V is not handed over."""
    views = []
    for cache in caches:
        axes = [axis for axis, size in enumerate(cache.shape[:2]) if size == blocks]
        if len(axes) != 1:
            raise ValueError(f"a KV cache of shape {tuple(cache.shape)} has no axis of {blocks} blocks")
        views.append(cache.movedim(axes[0], 0))
    if any(view.shape != views[0].shape or view.dtype != views[0].dtype for view in views):
        raise ValueError("layers with KV caches of several shapes are not handed over")
    return views


class BlockCopier:
    """`caches` as `block_views` gives them; `arena` is all of staging, of which rank `rank` of `world` has its part."""

    def __init__(self, caches: Sequence[Tensor], arena: memoryview, rank: int, world: int) -> None:
        self._caches = caches
        block = caches[0].shape[1:]
        self.block_bytes = len(caches) * block.numel() * caches[0].dtype.itemsize
        raw = torch.frombuffer(arena, dtype=torch.uint8)
        if caches[0].is_cuda:
            _pin(raw)
        slots = raw.numel() // (world * self.block_bytes)
        own = raw[: slots * world * self.block_bytes].view(slots, world, self.block_bytes)[:, rank]
        self._rows = _rows(caches, own)
        self._staged = own.view(caches[0].dtype).unflatten(1, (len(caches), *block))  # type: ignore[no-untyped-call]
        self._later: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]]] = queue.SimpleQueue()
        if caches[0].is_cuda:
            threading.Thread(target=self._tell_done, name="baton copies", daemon=True).start()

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Staging to cache, in order before whatever is computed next."""
        if self._caches[0].is_cuda:
            rows = self._staged[list(slots)].pin_memory().to(self._caches[0].device, non_blocking=True)
            index = torch.tensor(blocks, device=rows.device)
            for layer, cache in enumerate(self._caches):
                cache.index_copy_(0, index, rows[:, layer])
            return
        staged, caches = self._rows
        for slot, block in zip(slots, blocks, strict=True):
            row = staged[slot]
            for layer, cache in enumerate(caches):
                cache[block] = row[layer]

    def save(self, blocks: Sequence[int], slots: Sequence[int], saved: Callable[[], None]) -> None:
        """Cache to staging; `saved` is called when the bytes are there, from whichever thread."""
        if self._caches[0].is_cuda:
            index = torch.tensor(blocks, device=self._caches[0].device)
            rows = torch.stack([cache.index_select(0, index) for cache in self._caches], dim=1)
            for row, slot in zip(rows, slots, strict=True):
                self._staged[slot].copy_(row, non_blocking=True)
            self.then(saved)
            return
        staged, caches = self._rows
        for slot, block in zip(slots, blocks, strict=True):
            row = staged[slot]
            for layer, cache in enumerate(caches):
                row[layer] = cache[block]
        saved()

    def then(self, done: Callable[[], None]) -> None:
        """Call `done` when every copy until now has arrived, from whichever thread."""
        if not self._caches[0].is_cuda:
            done()
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._later.put((event, done))

    def _tell_done(self) -> None:
        while True:
            event, done = self._later.get()
            event.synchronize()
            done()


def _rows(caches: Sequence[Tensor], own: Tensor) -> tuple[Any, Sequence[Any]]:
    """Our part of the slots by layer, and each layer's cache by block, as what assigns a row fastest.

    Measured: 930 rows (1,000 tokens of 30 layers) as numpy's bytes take 2.8 ms, as torch's tensors 5.3 ms.
    """
    staged = own.unflatten(1, (len(caches), -1))  # type: ignore[no-untyped-call]
    if all(cache.is_contiguous() and not cache.is_cuda for cache in caches):
        return staged.numpy(), [cache.flatten(1).view(torch.uint8).numpy() for cache in caches]
    block = caches[0].shape[1:]
    return staged.view(caches[0].dtype).unflatten(2, tuple(block)), caches


def _pin(arena: Tensor) -> None:
    """Make host memory reachable for the GPU's copies. Raises RuntimeError when the driver refuses."""
    status = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {arena.numel()} bytes failed with {int(status)}")
