"""Workers and router with a KV store: what one computed another loads, and the text stays the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.worker.offers import REMEMBER_S
from tests.integration.asking import Answer, ask, plain_client
from tests.integration.resuming import complete, same
from tests.integration.stack import HANG_S, Stack, until
from tests.tiny_model import make_tiny_model

LONG = "The quick brown fox jumps over the lazy dog and thinks about blocks. " * 14  # about a thousand tokens
TOKENS = 24
FORGOTTEN_S = 4.0
"""Longer than the router goes on expecting blocks where it had them computed."""
OFFERED_S = 1.0
"""A little longer than live streams and queued offers take."""
DROPPED = "baton_worker_store_dropped_blocks_total"


pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that computing a thousand tokens takes longer than loading them."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), layers=4, hidden=256)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stores"), model, prefill=0, decode=0, merged=2).start()
    yield running
    running.teardown()


@pytest.fixture(autouse=True)
def _in_order(request: pytest.FixtureRequest) -> None:
    """Whatever the last test broke is there again."""
    if "stack" in request.fixturenames:
        stack: Stack = request.getfixturevalue("stack")
        stack.heal()
        until(lambda: stack.stores().get("kvstore", ("", 0))[0] == "serving", stack.stores)


def blocks(text: str, more: int = 0) -> int:
    """Full blocks of a prompt and so many tokens: the tiny model's tokens are bytes."""
    return (len(text) + more) // 32


async def fill(stack: Stack, client: httpx.AsyncClient, *prompts: str) -> list[Answer]:
    """Ask with everything cold, and wait until the store alone has the prompts and what was answered. After a fault a
    worker leaves the store alone for a moment, and what it does not offer then it offers with the next turn: so ask
    again."""
    stack.clear_caches()
    until(lambda: stack.stores()["kvstore"] == ("serving", 0), stack.stores)
    answers = [await ask(client, stack.url(), prompt, TOKENS) for prompt in prompts]
    assert not [answer.error for answer in answers if answer.error]
    answered = asyncio.get_running_loop().time()
    # The last token drawn has no KV. A few prompts may share their first blocks.
    wanted = max(blocks(prompt, TOKENS - 1) for prompt in prompts)
    hang = asyncio.get_running_loop().time() + HANG_S
    while stack.stores()["kvstore"][1] < wanted:
        assert asyncio.get_running_loop().time() < hang, fates(stack)
        await asyncio.sleep(OFFERED_S)
        if stack.stores()["kvstore"][1] < wanted:
            await ask(client, stack.url(), prompts[-1], TOKENS)
            answered = asyncio.get_running_loop().time()
    await asyncio.sleep(OFFERED_S)
    stack.clear_workers()
    until(lambda: stack.indexed() == stack.stores()["kvstore"][1], lambda: str(stack.indexed()))
    await asyncio.sleep(answered + FORGOTTEN_S - asyncio.get_running_loop().time())
    return answers


def fates(stack: Stack) -> list[str]:
    """What became of the blocks that were to be offered, as workers and store count it, and what they said of it."""
    counters = ("baton_worker_store_offered", "baton_worker_store_dropped", "baton_kvstore_refused")
    told = []
    for name in (*stack.workers(), "kvstore"):
        said = [line for line in stack.log(name).splitlines() if "offer" in line or "pair" in line]
        told += [f"{name}: {line}" for line in (*stack.figures(name, *counters), *said)]
    return told


async def test_a_prefix_is_loaded_and_the_text_is_the_same(stack: Stack) -> None:
    async with plain_client() as client:
        (cold,) = await fill(stack, client, "first " + LONG)
        assert not sum(stack.metric(name, DROPPED, reason="no_store") for name in stack.workers())
        warm = await ask(client, stack.url(), "first " + LONG, TOKENS)
    assert (warm.text, warm.error) == (cold.text, {})
    assert warm.story["store"] == "kvstore"
    assert warm.story["stored_tokens"] == blocks("first " + LONG) * 32
    assert not cold.story["stored_tokens"]
    assert warm.usage["prompt_tokens_details"]["cached_tokens"] == warm.story["stored_tokens"]
    assert "STORE_LOAD_FAILED" not in warm.reasons


async def test_the_next_turn_finds_what_was_answered(stack: Stack) -> None:
    """The store has the blocks of prompt and output, and their KV is as good as computed."""
    async with plain_client() as client:
        (first,) = await fill(stack, client, "turns " + LONG)
        longer = "turns " + LONG + first.text + " and what then? " * 4
        warm = await ask(client, stack.url(), longer, TOKENS)
        stack.clear_caches()
        await asyncio.sleep(FORGOTTEN_S)
        cold = await ask(client, stack.url(), longer, TOKENS)
    assert (warm.text, warm.error) == (cold.text, {})
    assert warm.story["stored_tokens"] >= blocks("turns " + LONG) * 32


async def test_flipped_bytes_in_the_store_are_a_miss(stack: Stack) -> None:
    async with plain_client() as client:
        (cold,) = await fill(stack, client, "flipped " + LONG)
        with memory(stack).open("r+b", buffering=0) as arena:
            size = os.fstat(arena.fileno()).st_size
            for start in range(0, size, 1 << 20):
                piece = bytearray(os.pread(arena.fileno(), 1 << 20, start))
                piece[::4096] = bytes(byte ^ 4 for byte in piece[::4096])
                os.pwrite(arena.fileno(), piece, start)
        before = failed_loads(stack, "KV_CHECKSUM_MISMATCH")
        warm = await ask(client, stack.url(), "flipped " + LONG, TOKENS)
        stack.clear_caches()  # before its own leak check finds the bytes
    assert (warm.text, warm.error) == (cold.text, {})
    assert warm.story["stored_tokens"] == 0
    assert "STORE_LOAD_FAILED" in warm.reasons
    assert failed_loads(stack, "KV_CHECKSUM_MISMATCH") == before + 1


async def test_the_store_is_killed_while_it_is_loaded_from(stack: Stack) -> None:
    """It is stopped first, so that every load is under way when it dies. No request fails, no text is wrong."""
    prompts = [f"killed {n} " + LONG for n in range(6)]
    async with plain_client() as client:
        cold = await fill(stack, client, *prompts)
        stack.stop("kvstore")
        asking = [asyncio.create_task(ask(client, stack.url(), prompt, TOKENS)) for prompt in prompts]
        await asyncio.sleep(0.2)
        stack.kill("kvstore")
        warm = await asyncio.gather(*asking)
        again = await asyncio.gather(*(ask(client, stack.url(), prompt, TOKENS) for prompt in prompts))
    assert [answer.error for answer in (*warm, *again)] == [{}] * 12
    assert [answer.text for answer in warm] == [answer.text for answer in cold]
    assert [answer.text for answer in again] == [answer.text for answer in cold]
    until(lambda: stack.stores().get("kvstore", ("quarantined", 0))[0] == "quarantined", stack.stores)


async def test_a_store_that_is_stopped_is_offered_to_nobody_until_it_speaks(stack: Stack) -> None:
    """Its lease and its connections stand."""
    prompts = [f"stopped {n} " + LONG for n in range(3)]
    async with plain_client() as client:
        cold = await fill(stack, client, *prompts)
        stack.stop("kvstore")
        asking = [asyncio.create_task(ask(client, stack.url(), prompt, TOKENS)) for prompt in prompts]
        quarantined = lambda: stack.stores().get("kvstore", ("gone", 0)) == ("quarantined", 0)  # noqa: E731
        await asyncio.to_thread(until, quarantined, stack.stores)
        assert stack.excluded_stores() == {"kvstore": "quarantined: is silent"}
        assert stack.metric("router", "baton_router_stores", state="quarantined") == 1
        warm = await asyncio.gather(*asking)
        again = [await ask(client, stack.url(), prompt, TOKENS) for prompt in prompts]
        stack.cont("kvstore")
        serving = lambda: stack.stores().get("kvstore", ("gone", 0))[0] == "serving"  # noqa: E731
        await asyncio.to_thread(until, serving, stack.stores)
        assert stack.excluded_stores() == {}
    assert [(answer.text, answer.error) for answer in warm] == [(answer.text, {}) for answer in cold]
    assert [(answer.text, answer.error) for answer in again] == [(answer.text, {}) for answer in cold]
    assert not any(answer.story["store"] for answer in again)


async def test_the_store_is_killed_at_any_moment(stack: Stack) -> None:
    """While prompts are offered and loaded; it comes back each time as another process."""
    prompts = [f"any {n} " + LONG for n in range(3)]
    async with plain_client() as client:
        cold = await fill(stack, client, *prompts)
        for pause in (0.0, 0.02, 0.05, 0.3):
            asking = [asyncio.create_task(ask(client, stack.url(), prompt, TOKENS)) for prompt in prompts]
            await asyncio.sleep(pause)
            stack.kill("kvstore")
            warm = await asyncio.gather(*asking)
            assert [answer.text for answer in warm] == [answer.text for answer in cold]
            stack.launch("kvstore").wait_ready()
            stack.clear_workers()


async def test_clients_that_go_away_while_their_prompt_is_loaded_leave_nothing(stack: Stack) -> None:
    """Also when the store does not answer meanwhile: the teardown's leak check, here at once."""
    prompts = [f"gone {n} " + LONG for n in range(4)]
    async with plain_client() as client:
        await fill(stack, client, *prompts)
        stack.stop("kvstore")
        asking = [asyncio.create_task(ask(client, stack.url(), prompt, TOKENS)) for prompt in prompts]
        await asyncio.sleep(0.1)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        stack.cont("kvstore")
    stack.settle()


async def test_a_prefill_worker_loads_and_decode_reads_it_from_there(tmp_path: Path, model: Path) -> None:
    stack = Stack(tmp_path, model, prefill=1, decode=1, merged=0, frontends={"frontend": "strict"}).start()
    try:
        async with plain_client() as client:
            (cold,) = await fill(stack, client, "apart " + LONG)
            warm = await ask(client, stack.url(), "apart " + LONG, TOKENS)
        assert (warm.text, warm.error) == (cold.text, {})
        assert warm.story["mode"] == "disaggregated"
        assert warm.story["stored_tokens"] == blocks("apart " + LONG) * 32
        assert stack.metric("prefill-1", "baton_worker_store_loads_total", result="ok") == 1
    finally:
        stack.teardown()


def memory(stack: Stack) -> Path:
    """The store's arena, as a file."""
    folder = Path(f"/proc/{stack.processes['kvstore'].process.pid}/fd")
    return next(fd for fd in folder.iterdir() if "baton-kvstore" in os.readlink(fd))


def failed_loads(stack: Stack, reason: str) -> float:
    return sum(stack.metric(name, "baton_worker_store_loads_total", result=reason) for name in stack.workers())


async def test_a_resume_finds_what_the_dead_worker_had_offered(stack: Stack) -> None:
    """Its prompt, and the blocks of the output that had filled: the rest alone is computed again."""
    prompt = "resumed " + LONG
    asked = {"prompt": prompt, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
    async with plain_client() as client:
        stack.clear_caches()
        undisturbed = await complete(client, stack.url(), asked)
        stack.clear_caches()
        await asyncio.sleep(REMEMBER_S + 1)  # workers believe for so long that the store has what it took
        workers: set[str] = set()
        asking = asyncio.create_task(complete(client, stack.url(), asked, lambda so_far: workers.add(so_far.worker)))
        offered = lambda: stack.stores()["kvstore"][1] > blocks(prompt) or asking.done()  # noqa: E731
        await asyncio.to_thread(until, offered, stack.stores)
        assert not asking.done(), "nothing was offered while it streamed"
        stack.kill(*workers)
        resumed = await asking
    same(resumed, undisturbed, hits=False)
    assert resumed.story["attempts"] == 2
    assert resumed.story["store"] == "kvstore"
    assert resumed.story["stored_tokens"] > blocks(prompt) * 32
