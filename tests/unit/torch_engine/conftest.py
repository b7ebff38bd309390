"""A tiny random Llama, what transformers says of it, and engines that are checked for leaks after every test."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from baton.engine.torch.host import TorchEngine
from tests.tiny_model import greedy, make_tiny_model
from tests.unit.torch_engine.client import Client

BLOCK_BYTES = 3 * 2 * 2 * 32 * 16 * 4
"""Of the tiny model in float32: layers, K and V, heads, tokens, numbers, bytes."""
Oracle = Callable[[list[int], int], list[int]]


def make_engine(model: Path, *, blocks: int = 96, epoch: int = 1, owner: str = "w", **options: object) -> TorchEngine:
    """Small, in float32: the dtype that promises exact text."""
    small = {"dtype": "float32", "max_streams": 16, "chunk_tokens": 24, "arena_bytes": blocks * BLOCK_BYTES}
    return TorchEngine(model, epoch=epoch, owner=owner, **small | options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    """transformers' greedy output in float32."""
    torch.set_num_threads(1)

    @functools.cache
    def cached(prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        return tuple(greedy(tiny_model, list(prompt), tokens))

    return lambda prompt, tokens: list(cached(tuple(prompt), tokens))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_engines(tiny_model: Path) -> AsyncIterator[tuple[Client, Client]]:
    """Two engines, of two owners in two epochs: one prefills for the other in some tests."""
    clients = []
    for number in (1, 2):
        engine = make_engine(tiny_model, epoch=100 + number, owner=f"w{number}")
        await engine.start()
        clients.append(Client(engine))
    yield clients[0], clients[1]
    for client in clients:
        await client.close()


@pytest_asyncio.fixture(loop_scope="package")
async def engines(shared_engines: tuple[Client, Client]) -> AsyncIterator[tuple[Client, Client]]:
    """The two with empty caches; nothing may be left in them afterwards."""
    for client in shared_engines:
        await client.engine.clear_cache()
    yield shared_engines
    for client in shared_engines:
        await client.idle()
        stats = client.engine.stats()
        assert stats.blocks_pinned == stats.blocks_quarantined == 0
        assert stats.blocks_free == stats.blocks_total


@pytest.fixture
def client(engines: tuple[Client, Client]) -> Client:
    return engines[0]
