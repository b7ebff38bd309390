"""Workers and router with a KV store: what one computed another loads, and the text stays the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.asking import Answer, ask, plain_client
from tests.integration.stack import Stack, until
from tests.tiny_model import make_tiny_model

LONG = "The quick brown fox jumps over the lazy dog and thinks about blocks. " * 14  # about a thousand tokens
TOKENS = 24
FORGOTTEN_S = 4.0
"""Longer than the router goes on expecting blocks where it had them computed."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stores")
    # Wide enough that computing a thousand tokens takes longer than loading them.
    model = make_tiny_model(directory / "model", layers=6, hidden=512)
    running = Stack(directory, model, prefill=0, decode=0, merged=2).start()
    yield running
    running.teardown()


async def fill(stack: Stack, client: httpx.AsyncClient, prompt: str) -> Answer:
    """Ask with cold workers, and wait until the store has what can be stored of it."""
    stack.clear_caches()
    until(lambda: stack.stores()["kvstore"] == ("serving", 0), stack.stores)
    answer = await ask(client, stack.url(), prompt, TOKENS)
    assert answer.status == 200
    assert not answer.error
    blocks = (len(prompt) + TOKENS - 1) // 32
    until(lambda: stack.stores()["kvstore"] == ("serving", blocks), stack.stores)
    stack.clear_workers()
    until(lambda: stack.indexed() == blocks, lambda: str(stack.indexed()))
    await asyncio.sleep(FORGOTTEN_S)
    return answer


async def test_a_prefix_is_loaded_and_the_text_is_the_same(stack: Stack) -> None:
    async with plain_client() as client:
        cold = await fill(stack, client, "first " + LONG)
        warm = await ask(client, stack.url(), "first " + LONG, TOKENS)
    assert warm.text == cold.text
    assert warm.story["store"] == "kvstore"
    assert warm.story["stored_tokens"] >= 900
    assert not cold.story["stored_tokens"]
    assert warm.usage["prompt_tokens_details"]["cached_tokens"] >= 900
