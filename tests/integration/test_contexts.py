"""Workers of unlike contexts side by side: an answer that outgrows its worker goes on where there is room for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.asking import openai_client, plain_client
from tests.integration.resuming import complete
from tests.integration.stack import SERVED, Stack, until
from tests.integration.test_batches import ended, start
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = "Each evening she climbed the stairs, lit the lamp, and waited for the fog to come in from the sea. " * 6
SMALL = {"dtype": "float32", "pool_gib": 0.0004}
"""A pool of some 500 tokens (768 bytes each), which is then its worker's context."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("contexts")
    model = make_tiny_model(directory / "tiny")
    small = {"merged-1": ("merged", SMALL), "prefill-1": ("prefill", SMALL)}
    frontends = {"frontend": "auto", "strict": "strict"}
    flags = {"kvstore": False, "pool_gib": 0.05, "chunk_tokens": 64}
    run = Stack(directory, model, prefill=0, decode=1, merged=0, frontends=frontends, extra=small, **flags)
    run._plan["frontend"][1]["batch_dir"] = directory / "kept"
    run.start()
    yield run
    run.teardown()


def asked(n: int, length: int, **more: object) -> dict[str, Any]:
    return {"prompt": f"{n} {LONG}"[:length], "temperature": 0, "ignore_eos": True, **more}


async def test_a_prompt_that_fills_the_prefills_context_is_answered_whole(stack: Stack) -> None:
    largest = 0
    async with plain_client() as client:
        for length in range(440, 530):
            body = asked(length, length, max_tokens=9, stream=True)
            got = await complete(client, stack.url("strict"), body)
            while got.status == 429:  # the one before has just left
                await asyncio.sleep(0.05)
                got = await complete(client, stack.url("strict"), body)
            if got.status != 200:
                assert got.errors[0]["code"] == "context_length_exceeded", got.errors
                break
            largest = length
            assert (got.usage["completion_tokens"], got.of(0).finish, got.errors) == (9, "length", [])
            assert got.route.startswith("disaggregated")
    assert largest % 32 == 31, "all of the prefill's context but the place of one token"


async def test_lines_wait_for_the_only_worker_with_room_for_them(stack: Stack) -> None:
    """However often they are refused meanwhile."""
    asked = {
        "/v1/embeddings": {"input": [9] * 700},
        "/v1/completions": {"prompt": [9] * 700, "max_tokens": 4, "temperature": 0, "ignore_eos": True},
    }
    async with openai_client(stack) as client:
        stack.kill("decode-1")
        batches = []
        for url, body in asked.items():
            line = {"custom_id": "one", "method": "POST", "url": url, "body": {"model": SERVED, **body}}
            batches.append(await start(client, [line], url))
        # Each of them alone: 0.1 s to 2 s between two refusals.
        until(lambda: refusals(stack) >= 2 * 6)
        stack.launch("decode-1").wait_ready()
        for batch in batches:
            over = await ended(client, batch.id)
            assert (over.status, over.request_counts.completed) == ("completed", 1)
    stack.wait_usable()


def refusals(stack: Stack) -> float:
    return stack.metric("frontend", "baton_frontend_batch_retries_total", reason="DECODE_UNAVAILABLE")


async def test_an_answer_that_outgrows_its_worker_goes_on_elsewhere(stack: Stack) -> None:
    many = [asked(n, 380, max_tokens=300, stream=n % 2 == 0) for n in range(8)]
    async with plain_client() as client:
        mixed = await asyncio.gather(*(complete(client, stack.url(), body) for body in many))
        assert any("RESUMED" in one.story["reasons"] for one in mixed)
        stack.kill("merged-1", "prefill-1")  # only the one with room is left
        for body, one in zip(many, mixed, strict=True):
            alone = await complete(client, stack.url(), body)
            assert (one.status, one.errors, one.done) == (200, [], True)
            assert one.usage["completion_tokens"] == alone.usage["completion_tokens"] == 300
            assert (one.of(0).text, one.of(0).finish) == (alone.of(0).text, alone.of(0).finish)
            assert one.of(0).finish == "length"
