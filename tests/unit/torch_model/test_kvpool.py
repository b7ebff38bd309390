"""The pool's tensor is the arena's bytes, laid out as the layout fingerprint promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.torch.config import ModelConfig, load_config
from baton.engine.torch.kvpool import KvPool
from baton.kv.arena import Arena
from baton.kv.layout import LayoutFingerprint
from tests.unit.torch_model.files import write_directory


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path: Path = tmp_path_factory.mktemp("model")
    write_directory(path, "llama")
    return load_config(path)


def layout(config: ModelConfig, dtype: str) -> LayoutFingerprint:
    return LayoutFingerprint("0" * 32, config.layers, config.kv_heads, config.head_dim, 32, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_is_what_travels(config: ModelConfig, dtype: str) -> None:
    kind = getattr(torch, dtype)
    block_bytes = layout(config, dtype).block_bytes
    arena = Arena.create(5 * block_bytes + 100)
    pool = KvPool(arena.buffer, config, kind)
    assert (pool.slots, pool.block_bytes) == (5, block_bytes)
    written = torch.randn(config.layers, 2, config.kv_heads, 32, config.head_dim).to(kind)
    pool.tensor[3] = written
    assert bytes(arena.view(3 * block_bytes, block_bytes)) == bytes(written.view(torch.uint8).numpy().tobytes())
    assert not any(arena.view(0, 3 * block_bytes))
    assert not any(arena.view(4 * block_bytes, block_bytes + 100))


def test_bytes_that_arrive_are_seen(config: ModelConfig) -> None:
    arena = Arena.create(2 * layout(config, "float32").block_bytes)
    pool = KvPool(arena.buffer, config, torch.float32)
    sent = torch.randn(pool.tensor[0].shape)
    arena.view(pool.block_bytes, pool.block_bytes)[:] = sent.numpy().tobytes()
    assert torch.equal(pool.tensor[1], sent)


def test_copying_and_clearing_touch_nothing_else(config: ModelConfig) -> None:
    block_bytes = layout(config, "float32").block_bytes
    pool = KvPool(torch.zeros(4 * block_bytes, dtype=torch.uint8), config, torch.float32)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    before = pool.tensor.clone()

    pool.copy_slot(1, 3)
    before[3] = before[1]
    assert torch.equal(pool.tensor, before)

    pool.zero_tail(3, 5)
    before[3, :, :, :, 5:] = 0
    assert torch.equal(pool.tensor, before)

    pool.zero_tail(1, 32)
    assert torch.equal(pool.tensor, before)

    pool.zero([0, 2])
    before[[0, 2]] = 0
    assert torch.equal(pool.tensor, before)


def test_no_room_for_one_block(config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="no KV block"):
        KvPool(torch.zeros(layout(config, "float32").block_bytes - 1, dtype=torch.uint8), config, torch.float32)
