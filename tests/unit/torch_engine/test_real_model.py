"""SmolLM2-135M, the model that the laptop serves, against transformers in float32."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from baton.engine.torch.host import TorchEngine
from baton.model.tokenizer import load_tokenizer
from tests.unit.torch_engine.client import Client, hand_over, request

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are:\n1.",
    "Q: Why is the sky blue?\nA:",
    "To bake a loaf of bread you need",
    "In 1969, the first humans",
    "A list of prime numbers: 2, 3, 5,",
]
TOKENS = 64


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt and greedy output of each text, from transformers' reading of the same file."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path.parent, gguf_file=model_path.name, dtype=torch.float32)
    found = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special=False)
        # More than a block of prompt for the later ones.
        ids = (ids * 10)[: len(ids) + 12 * len(found)]
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=[],
            pad_token_id=0,
        )
        found.append((ids, output[0, len(ids) :].tolist()))
    return found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair(model_path: Path) -> AsyncIterator[tuple[Client, Client]]:
    clients = []
    for number in (1, 2):
        engine = TorchEngine(
            model_path, dtype="float32", arena_bytes=256 * 2**20, chunk_tokens=64, epoch=number, owner=f"w{number}"
        )
        await engine.start()
        clients.append(Client(engine))
    yield clients[0], clients[1]
    for client in clients:
        await client.idle()
        await client.close()


async def test_alone(pair: tuple[Client, Client], expected: list[tuple[list[int], list[int]]]) -> None:
    for prompt, output in expected:
        assert await pair[0].complete(request(prompt, max_tokens=TOKENS)) == output


async def test_in_a_batch(pair: tuple[Client, Client], expected: list[tuple[list[int], list[int]]]) -> None:
    await pair[0].engine.clear_cache()
    streams = [await pair[0].submit(request(prompt, max_tokens=TOKENS)) for prompt, _ in expected]
    for stream, (_, output) in zip(streams, expected, strict=True):
        assert await stream.tokens() == output


async def test_handed_over(pair: tuple[Client, Client], expected: list[tuple[list[int], list[int]]]) -> None:
    """All at once, no prompt token computed on the second engine."""
    await pair[0].engine.clear_cache()
    handed = await asyncio.gather(
        *(hand_over(pair[0], pair[1], request(prompt, max_tokens=TOKENS)) for prompt, _ in expected)
    )
    for (stream, _), (_, output) in zip(handed, expected, strict=True):
        assert await stream.tokens() == output
    assert pair[1].engine.stats().prefill_tokens_computed == 0
