"""A whole stack under load, its store with a disk: kill -9 of the store in the middle of it is seen by nobody, and what
lay sealed on the disk is found again, loaded and right.

A random model in f32, greedy, so that there is one right answer: what the stack says without any store.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.asking import plain_client
from tests.integration.resuming import Completion, complete
from tests.integration.stack import Stack, until
from tests.tiny_model import make_tiny_model

pytestmark = pytest.mark.integration

GROUPS = 3
"""Different shared prefixes."""
CONVERSATIONS = 12
TURNS = 3
TOKENS = 16
CLIENTS = 4
SYSTEM = "You keep the lighthouse, you count the ships and you write down what passes. " * 8
ASKED = "What came by at the hour of {} on the day {} of the year, and who was aboard of it and why? "

BLOCK = 128 * 1024
HOST_GIB = 64 * BLOCK / 2**30
"""A quarter of what all conversations take."""
NVME_GIB = 512 * (BLOCK + 4096) / 2**30
"""Nothing has to leave: what was clean once is clean when it is found."""
SEALED = 80
"""Blocks on the disk before the store is killed: about a third of all."""
FOUND = 0.95
"""Of the clean slots, after a restart."""
LOADED = 40
"""Blocks that come up from the disk again before the load ends, and as many that requests then load."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Workers whose caches are smaller than the conversations, so that the store is of use all the time."""
    model = make_tiny_model(tmp_path / "wide", layers=4, hidden=256)
    store = {"capacity_gib": HOST_GIB, "nvme_dir": tmp_path / "nvme", "nvme_gib": NVME_GIB}
    running = Stack(tmp_path, model, store=store, pool_gib=0.02).start()
    yield running
    running.teardown()


async def talk(client: httpx.AsyncClient, url: str, number: int, stream: bool) -> list[Completion]:
    """One conversation, turn by turn, each with what was answered before."""
    system = {"role": "system", "content": f"House {number % GROUPS}. {SYSTEM}"}
    messages, answers = [system], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": ASKED.format(turn, number) * 2})
        body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
        answers.append(await complete(client, url, body))
        # Another list each time: the last one belongs to the request that was sent.
        messages = [*messages, {"role": "assistant", "content": answers[-1].of(0).text}]
    return answers


class Load:
    """Clients that talk, conversation after conversation, streamed and whole, until the context ends."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self.told: list[tuple[int, list[Completion]]] = []
        """Conversations that ended, in this order."""
        self._ending = False
        self._clients = [asyncio.create_task(self._talk(client, url, seed)) for seed in range(CLIENTS)]

    async def _talk(self, client: httpx.AsyncClient, url: str, seed: int) -> None:
        rng = random.Random(seed)
        for n in itertools.count(seed):
            if self._ending:
                return
            number = rng.randrange(CONVERSATIONS)
            self.told.append((number, await talk(client, url, number, stream=bool(n % 2))))

    async def goes_on(self, conversations: int) -> None:
        """Until so many more have ended."""
        wanted = len(self.told) + conversations
        await self.until(lambda: len(self.told) >= wanted)

    async def until(self, condition: Callable[[], object]) -> None:
        """Until `condition()`, which is asked in a thread. Fails with the first client that did."""
        waiting = asyncio.create_task(asyncio.to_thread(until, condition, lambda: "the load hangs"))
        await asyncio.wait([waiting, *self._clients], return_when=asyncio.FIRST_COMPLETED)
        for task in self._clients:
            if task.done():
                task.result()
        await waiting

    def loaded(self, since: int) -> int:
        """Tokens that came from the store, in the conversations that ended since there were so many."""
        return sum(answer.story["stored_tokens"] for _, answers in self.told[since:] for answer in answers)

    async def end(self) -> None:
        """Let every client end its conversation."""
        self._ending = True
        await asyncio.gather(*self._clients)


def writing_behind(stack: Stack) -> bool:
    """Whether blocks wait to be written, or are being."""
    return any(int(n) for found in stack.held("kvstore") for n in re.findall(r"(\d+) on their way down", found))


def sealed(slab: Path) -> set[bytes]:
    """Keys of the slots that say SEALED in the era of their slab: read by offset, with none of the store's code."""
    raw = slab.read_bytes()
    _, _, era, size = struct.unpack_from("<8sIQQ", raw)
    step = 4096 + -(-size // 4096) * 4096
    headers = (struct.unpack_from("<8sIQQ16s", raw, at) for at in range(4096, len(raw) - step + 1, step))
    return {key for magic, state, of, _, key in headers if (magic, state, of) == (b"BATONKVB", 2, era)}


def disk(stack: Stack, operation: str, outcome: str) -> float:
    """So many blocks of this process of the store's."""
    labels = {"tier": "nvme", "operation": operation, "outcome": outcome}
    return stack.metric("kvstore", "baton_kvstore_tier_operations_total", **labels)


def came_up(stack: Stack) -> float:
    """Blocks that look-ups and prefetches brought up from the disk, of the same."""
    return stack.metric("kvstore", "baton_kvstore_promoted_blocks_total", result="ok")


async def test_killed_under_load_and_found_again(stack: Stack, tmp_path: Path) -> None:
    stack.kill("kvstore")
    async with plain_client() as client:
        quiet = [await talk(client, stack.url(), number, stream=False) for number in range(CONVERSATIONS)]
        stack.clear_workers()
        await asyncio.to_thread(stack.heal, "kvstore")
        await asyncio.to_thread(until, lambda: stack.stores().get("kvstore", ("",))[0] == "serving", stack.stores)

        load = Load(client, stack.url())
        await load.until(lambda: stack.metric("kvstore", "baton_kvstore_blocks", tier="nvme") >= SEALED)
        listed: set[bytes] = set()

        def strike() -> bool:
            nonlocal listed
            listed = stack.listed("nvme")
            if writing_behind(stack):
                stack.kill("kvstore")
                return True
            return False

        await load.until(strike)
        clean = sealed(tmp_path / "nvme" / "slab")
        assert listed <= clean, "a block that is listed is sealed, and a kill takes nothing back"
        await load.goes_on(CLIENTS)

        before = len(load.told)
        await asyncio.to_thread(stack.launch("kvstore").wait_ready)
        await load.until(lambda: disk(stack, "scan", "blocks"))
        found = disk(stack, "scan", "blocks")
        assert found >= FOUND * len(clean), f"{found} of {len(clean)}"
        assert len(clean & stack.listed("nvme")) >= FOUND * len(clean)
        stack.clear_workers()  # a host that is empty, too: what is asked for now lies on the disk alone
        # A load has no longer than computing would take, and after a late one the store rests: some are not worth it.
        await load.until(lambda: came_up(stack) >= LOADED and load.loaded(before) >= LOADED * 32)
        await load.end()

    for number, answers in [*enumerate(quiet), *load.told]:
        assert [(a.status, a.errors, a.done) for a in answers] == [(200, [], True)] * TURNS
        assert [a.of(0).text for a in answers] == [a.of(0).text for a in quiet[number]]
        assert all(a.usage["completion_tokens"] == TOKENS for a in answers)
    assert not any(a.story["stored_tokens"] for answers in quiet for a in answers)
    print(f"found {found} of {len(clean)}; {came_up(stack)} blocks came up, {load.loaded(before)} tokens were loaded")
    assert not disk(stack, "load", "corrupt")
    stack.settle()
    assert not stack.rotten()
