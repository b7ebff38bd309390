"""Loads from a store that answers, lies, hangs or dies: the prompt is computed then, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.engine.port import EngineStats
from baton.errors import Reason
from baton.kv.keys import block_keys
from baton.v1 import worker_pb2 as pb
from tests.unit.worker.engine import BLOCK, token
from tests.unit.worker.pair import Pair, pair
from tests.unit.worker.scripted_store import ScriptedStore, scripted_store

PROMPT = list(range(1, 4 * BLOCK + 3))
KEYS = block_keys(bytes(16), PROMPT, BLOCK)


@pytest.fixture
async def workers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    async with pair() as found:
        for one in (found.prefill, found.decode):  # slow enough that connecting is not too late
            monkeypatch.setattr(one.engine, "stats", lambda: EngineStats(prefill_tok_s=10.0))
        yield found


@pytest.fixture
async def store(workers: Pair) -> AsyncIterator[ScriptedStore]:
    """Readable where the prefill worker is: reads are scripted, pairing is real."""
    async with scripted_store(workers.prefill.context.peer) as found:
        found.keys = set(KEYS)
        yield found
        async with asyncio.timeout(20):
            while found.pins:  # noqa: ASYNC110 - on the server's side
                await asyncio.sleep(0.01)


def plan(store: ScriptedStore, tokens: int = 4 * BLOCK) -> pb.Plan:
    """Decode computes what the store does not have."""
    return pb.Plan(mode=pb.MODE_LOCAL, store=store.target(), stored_tokens=tokens, store_tier="host")


async def run(workers: Pair, store: ScriptedStore, uid: str = "r", **options: object) -> pb.Event:
    await workers.client.submit(uid, PROMPT, plan(store), **options)
    last = await workers.client.until(uid)
    assert workers.client.tokens(uid) == [token(PROMPT, 0, i) for i in range(6)]
    return last


def counted(workers: Pair, result: str) -> float:
    return workers.decode.context.metrics.store_loads.labels(result)._value.get()


async def test_what_the_store_has_is_not_computed(workers: Pair, store: ScriptedStore) -> None:
    last = await run(workers, store, tenant="t")
    assert (last.route.store, last.route.stored_tokens) == ("prefill-1", 4 * BLOCK)
    assert (last.route.store_tier, last.route.computed_tokens) == ("host", 2)
    assert last.route.store_seconds > 0
    assert last.route.store_bytes > 0
    assert list(last.route.reasons) == []
    assert workers.decode.engine.generated[0][2] == 4 * BLOCK
    assert [bytes(k) for k in store.looked_up[0].keys] == KEYS
    assert store.looked_up[0].tenant == "t"
    assert store.looked_up[0].deadline_s > 0
    assert counted(workers, "ok") == 1


async def test_blocks_of_a_slower_tier_come_later(workers: Pair, store: ScriptedStore) -> None:
    store.keys, store.tail = set(KEYS[:1]), set(KEYS[1:])
    last = await run(workers, store)
    assert last.route.stored_tokens == 4 * BLOCK


async def test_a_part_is_used(workers: Pair, store: ScriptedStore) -> None:
    store.keys = set(KEYS[:2])
    last = await run(workers, store)
    assert last.route.stored_tokens == 2 * BLOCK
    assert list(last.route.reasons) == ["STORE_LOAD_FAILED"]
    assert counted(workers, "NOT_FOUND") == 1
    await run(workers, store, "again")
    assert len(store.looked_up) == 2  # having less than was thought is no failure of the store


async def test_a_bad_block_ends_the_prefix(workers: Pair, store: ScriptedStore) -> None:
    workers.decode.engine.fail_read = [Reason.KV_CHECKSUM_MISMATCH]
    last = await run(workers, store)
    assert last.route.stored_tokens == 0
    assert list(last.route.reasons) == ["STORE_LOAD_FAILED"]
    assert counted(workers, "KV_CHECKSUM_MISMATCH") == 1


async def test_a_store_that_says_nothing_costs_what_computing_would(workers: Pair, store: ScriptedStore) -> None:
    store.gate.clear()
    last = await run(workers, store)
    assert last.route.stored_tokens == 0
    assert counted(workers, "KV_TRANSFER_TIMEOUT") == 1


async def test_a_store_that_failed_is_not_asked_for_a_while(workers: Pair, store: ScriptedStore) -> None:
    store.fail = grpc.StatusCode.INTERNAL
    await run(workers, store)
    assert counted(workers, "STORE_UNAVAILABLE") == 1
    last = await run(workers, store, "again")
    assert last.route.store == ""
    assert counted(workers, "resting") == 1
    assert len(store.looked_up) == 1


async def test_a_store_that_is_gone(workers: Pair, store: ScriptedStore) -> None:
    address, store.address = store.address, "127.0.0.1:1"
    last = await run(workers, store)
    store.address = address
    assert last.route.stored_tokens == 0
    assert counted(workers, "KV_TRANSFER_TIMEOUT") + counted(workers, "STORE_UNAVAILABLE") == 1


async def test_prompt_logprobs_are_computed(workers: Pair, store: ScriptedStore) -> None:
    await run(workers, store, prompt_logprobs=1)
    assert store.looked_up == []


@pytest.mark.parametrize("stage", ["look-up", "read"])
async def test_an_abort_in_mid_load_leaves_nothing(workers: Pair, store: ScriptedStore, stage: str) -> None:
    """The reservation goes and the pin ends (the fixtures see to it)."""
    waiting = store.gate if stage == "look-up" else workers.decode.engine.gate
    engine = workers.decode.engine
    if stage == "look-up":
        waiting.clear()
    submitting = asyncio.create_task(workers.client.submit("r", PROMPT, plan(store)))
    async with asyncio.timeout(20):
        while not engine.made:  # noqa: ASYNC110 - what is waited for happens in another task
            await asyncio.sleep(0)
        waiting.clear()
        await submitting
        while stage == "read" and not store.looked_up:  # noqa: ASYNC110
            await asyncio.sleep(0)
    attempt = workers.client.attempt("r")
    assert attempt is not None
    attempt.abort()
    async with asyncio.timeout(20):
        await workers.decode.serving.attempts.idle()
        while engine.live:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert workers.client.tokens("r") == []
    waiting.set()


async def test_a_prefill_worker_loads_and_tells_it(workers: Pair, store: ScriptedStore) -> None:
    handed_over = pb.Plan(
        mode=pb.MODE_DISAGGREGATED,
        prefill=workers.prefill.target(),
        store=store.target(),
        stored_tokens=4 * BLOCK,
        store_tier="nvme",
    )
    await workers.client.submit("r", PROMPT, handed_over)
    last = await workers.client.until("r")
    assert workers.client.tokens("r") == [token(PROMPT, 0, i) for i in range(6)]
    # The store is readable as the prefill worker itself, which does not read from itself: told all the same.
    assert last.route.store == "prefill-1"
    assert last.route.store_tier == "nvme"
