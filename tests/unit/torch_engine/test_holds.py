"""Sealed blocks held for a reader outside: they stay what they are, and are given back whatever becomes of it."""

from __future__ import annotations

import asyncio

import pytest

from baton.kv.handle import checksum
from baton.kv.keys import block_keys
from tests.unit.torch_engine.client import ROOT, Client, request

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROMPT = [(i * i + 7 * i) % 300 for i in range(100)]


async def test_held_blocks_outlive_their_request_and_a_cleared_cache(client: Client) -> None:
    tokens = await client.complete(request(PROMPT, max_tokens=40))
    keys = block_keys(ROOT, [*PROMPT, *tokens[:-1]])
    engine = client.engine
    async with engine.hold([bytes(16), *keys]) as handles:
        assert [handle.key for handle in handles] == keys
        await engine.clear_cache()
        for handle in handles:
            (segment,) = handle.segments
            payload = engine.arena.view(segment.offset, segment.length)
            assert checksum(handle.key, handle.epoch, handle.generation, payload) == handle.checksum
        assert any("held for a reader" in finding for finding in await engine.check_integrity())
    await client.idle()
    assert await engine.clear_cache() == len(keys)
    async with engine.hold(keys) as handles:
        assert handles == []


async def test_a_cancelled_reader_leaves_nothing(client: Client) -> None:
    tokens = await client.complete(request(PROMPT))
    keys = block_keys(ROOT, [*PROMPT, *tokens[:-1]])

    async def read() -> None:
        async with client.engine.hold(keys):
            await asyncio.Event().wait()

    for turns in range(6):
        reading = asyncio.create_task(read())
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await client.idle()
