"""Bytes between staging and vLLM's cache."""

from __future__ import annotations

import pytest
import torch

from baton.engine.vllm.copying import BlockCopier, block_views

BLOCKS, LAYERS = 7, 3


def caches(shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(LAYERS)]


@pytest.mark.parametrize("shape", [(BLOCKS, 2, 32, 16), (2, BLOCKS, 32, 2, 8)])
@pytest.mark.parametrize("world", [1, 2])
def test_what_one_engine_saves_another_loads(shape: tuple[int, ...], world: int) -> None:
    """Each rank its own part of every slot."""
    theirs = [caches(shape, 10 + rank) for rank in range(world)]
    ours = [caches(shape, 20 + rank) for rank in range(world)]
    kept = [[cache.clone() for cache in layers] for layers in ours]
    views = [block_views(layers, BLOCKS) for layers in theirs]
    block_bytes = LAYERS * views[0][0][0].numel() * 4
    arena = memoryview(bytearray(5 * world * block_bytes + 11))
    saved: list[int] = []
    for rank in range(world):
        copier = BlockCopier(views[rank], arena, rank, world)
        assert copier.block_bytes == block_bytes
        copier.save([6, 1], [4, 2], lambda rank=rank: saved.append(rank))
        BlockCopier(block_views(ours[rank], BLOCKS), arena, rank, world).load([2, 4], [0, 5])
    assert saved == list(range(world))
    for rank in range(world):
        got, had = block_views(ours[rank], BLOCKS), block_views(kept[rank], BLOCKS)
        for layer in range(LAYERS):
            assert torch.equal(got[layer][0], views[rank][layer][1])
            assert torch.equal(got[layer][5], views[rank][layer][6])
            for untouched in (1, 2, 3, 4, 6):
                assert torch.equal(got[layer][untouched], had[layer][untouched])


def test_caches_that_are_not_whole_blocks_of_one_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="no axis of 9 blocks"):
        block_views(caches((BLOCKS, 2, 32, 16), 1), 9)
    with pytest.raises(ValueError, match="several shapes"):
        block_views([torch.zeros(BLOCKS, 2, 32, 16), torch.zeros(BLOCKS, 2, 32, 8)], BLOCKS)
