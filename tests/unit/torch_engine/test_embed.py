"""Embeddings of the torch engine: transformers' mean of the last hidden states, alone, together, and beside streams."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.errors import BatonError, Reason
from tests.unit.torch_engine.client import HANG_S, Client, request

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROMPTS = [[(i * i + 13 * i + n) % 300 for i in range(length)] for n, length in enumerate((1, 7, 24, 33, 100, 301))]
TOLERANCE = 2e-5
"""Of numbers around 1, in float32: a sum's order depends on who else is in the step."""


def mean_of_hidden(model: Path, ids: list[int]) -> np.ndarray:
    from transformers import LlamaForCausalLM

    oracle = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return oracle.model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()


async def embed(client: Client, ids: list[int], deadline_s: float = HANG_S) -> np.ndarray:
    return np.frombuffer(await client.engine.embed(ids, time.time() + deadline_s), "<f4")


async def test_it_is_the_mean_of_the_last_hidden_states(client: Client, tiny_model: Path) -> None:
    for ids in PROMPTS:
        found = await embed(client, ids)
        expected = mean_of_hidden(tiny_model, ids)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max())


async def test_together_and_beside_streams_they_are_what_they_are_alone(client: Client) -> None:
    alone = [await embed(client, ids) for ids in PROMPTS]
    undisturbed = await client.complete(request(PROMPTS[4], max_tokens=40))
    stream = await client.submit(request(PROMPTS[4], max_tokens=40))
    together = await asyncio.gather(*(embed(client, ids) for ids in PROMPTS * 2))
    for found, expected in zip(together, alone * 2, strict=True):
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max())
    assert await stream.tokens() == undisturbed


async def test_one_that_is_cancelled_or_late_holds_nothing(client: Client) -> None:
    stats = client.engine.stats()
    waiting = [asyncio.create_task(embed(client, PROMPTS[5])) for _ in range(3)]
    await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    with pytest.raises(BatonError) as caught:
        await embed(client, PROMPTS[5], deadline_s=-1.0)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    await client.idle()
    assert client.engine.stats().blocks_free == stats.blocks_total


@pytest.mark.parametrize("ids", [[], [320], [-1], [1] * 2049])
async def test_what_is_no_input_is_refused(client: Client, ids: list[int]) -> None:
    with pytest.raises(BatonError) as caught:
        await embed(client, ids)
    assert caught.value.param == "input"


async def test_the_engines_death_is_told(tiny_model: Path) -> None:
    from tests.unit.torch_engine.conftest import make_engine

    client = Client(make_engine(tiny_model))
    await client.engine.start()
    waiting = asyncio.create_task(embed(client, PROMPTS[5]))
    await asyncio.sleep(0)
    client.engine.link.fail(BatonError(Reason.ENGINE_FAILED, "gone"))
    with pytest.raises(BatonError) as caught:
        await waiting
    assert caught.value.reason is Reason.ENGINE_FAILED
    await client.close()
