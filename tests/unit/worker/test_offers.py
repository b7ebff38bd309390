"""Write-behind: what is offered, what is not, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from baton.engine.port import EngineStats
from baton.kv.keys import block_keys
from baton.v1 import worker_pb2 as pb
from baton.worker.offers import BLOCKS, MAX_QUEUED
from tests.unit.worker.engine import BLOCK, token
from tests.unit.worker.pair import Pair, pair
from tests.unit.worker.scripted_store import EPOCH, ScriptedStore, scripted_store

HANG_S = 20.0
KEYS = [bytes([n]) * 16 for n in range(100)]


@pytest.fixture
async def workers() -> AsyncIterator[Pair]:
    async with pair() as found:
        for one in (found.prefill, found.decode):
            one.engine.cached = set(KEYS)
        yield found


@pytest.fixture
async def store(workers: Pair) -> AsyncIterator[ScriptedStore]:
    async with scripted_store(workers.prefill.context.peer) as found:
        for one in (workers.prefill, workers.decode):
            one.serving.stores.registered("prefill-1", found.registration())
        yield found


async def until(wanted: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not wanted():  # noqa: ASYNC110 - what is waited for happens in many places
            await asyncio.sleep(0.005)


def dropped(workers: Pair, reason: str) -> float:
    return workers.decode.context.metrics.store_dropped.labels(reason)._value.get()


def offered(workers: Pair, result: str) -> float:
    return workers.decode.context.metrics.store_offered.labels(result)._value.get()


def keys_of(store: ScriptedStore) -> list[list[bytes]]:
    return [[handle.key for handle in offer.handles] for offer in store.offers]


async def test_blocks_are_held_while_the_store_reads_them(workers: Pair, store: ScriptedStore) -> None:
    store.gate.clear()
    workers.decode.serving.offers.offer(KEYS[:3], "t")
    await until(lambda: store.offers)
    assert workers.decode.engine.held == [KEYS[:3]]
    assert (store.offers[0].tenant, store.offers[0].peer.owner) == ("t", "decode-1")
    store.gate.set()
    await until(lambda: not workers.decode.engine.held)
    await until(lambda: offered(workers, "stored") == 3)


async def test_what_the_store_took_is_not_offered_again(workers: Pair, store: ScriptedStore) -> None:
    offers = workers.decode.serving.offers
    offers.offer(KEYS[:3], "")
    await until(lambda: offered(workers, "stored") == 3)
    offers.offer(KEYS[:5], "")
    await until(lambda: offered(workers, "stored") == 5)
    assert keys_of(store) == [KEYS[:3], KEYS[3:5]]


async def test_another_process_has_nothing(workers: Pair, store: ScriptedStore) -> None:
    offers = workers.decode.serving.offers
    offers.offer(KEYS[:3], "")
    await until(lambda: offered(workers, "stored") == 3)
    workers.decode.serving.stores.registered("prefill-1", store.registration(epoch=6))
    offers.offer(KEYS[2:4], "")
    await until(lambda: len(store.offers) == 2)
    offers.offer(KEYS[:3], "")
    await until(lambda: len(store.offers) == 3)
    assert keys_of(store)[2] == KEYS[:2]


async def test_long_conversations_go_in_pieces(workers: Pair, store: ScriptedStore) -> None:
    workers.decode.serving.offers.offer(KEYS[:30], "")
    await until(lambda: offered(workers, "stored") == 30)
    most = min(BLOCKS, 100 // 8)
    assert [len(keys) for keys in keys_of(store)] == [most, most, 30 - 2 * most]


async def test_what_is_not_here_any_more_is_dropped(workers: Pair, store: ScriptedStore) -> None:
    workers.decode.engine.cached -= {KEYS[1]}
    workers.decode.serving.offers.offer(KEYS[:3], "")
    await until(lambda: offered(workers, "stored") == 2)
    assert dropped(workers, "evicted") == 1


async def test_without_a_store_nothing_waits(workers: Pair) -> None:
    workers.decode.serving.offers.offer(KEYS[:3], "")
    assert dropped(workers, "no_store") == 3


async def test_the_queue_is_bounded(workers: Pair, store: ScriptedStore) -> None:
    store.gate.clear()
    offers = workers.decode.serving.offers
    offers.offer(KEYS[:1], "")
    await until(lambda: store.offers)
    for _ in range(MAX_QUEUED + 2):
        offers.offer(KEYS[1:4], "")
    assert dropped(workers, "queue_full") == 6
    store.gate.set()


async def test_a_pool_that_is_short_is_left_alone(
    workers: Pair, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.decode.engine, "stats", lambda: EngineStats(blocks_total=100, blocks_free=20))
    workers.decode.serving.offers.offer(KEYS[:3], "")
    await until(lambda: dropped(workers, "pool_short") == 3)
    assert store.offers == []


async def test_a_store_that_fails_rests(workers: Pair, store: ScriptedStore) -> None:
    store.fail = grpc.StatusCode.INTERNAL
    offers = workers.decode.serving.offers
    offers.offer(KEYS[:40], "")
    await until(lambda: dropped(workers, "STORE_UNAVAILABLE"))
    offers.offer(KEYS[:3], "")
    assert dropped(workers, "no_store") == 3
    await until(lambda: dropped(workers, "given_up") == 40 - 12)


async def test_what_an_earlier_process_failed_at_is_not_held_against_the_next(
    workers: Pair, store: ScriptedStore
) -> None:
    offers, stores = workers.decode.serving.offers, workers.decode.serving.stores
    store.gate.clear()
    store.fail = grpc.StatusCode.UNAVAILABLE
    offers.offer(KEYS[:3], "")
    await until(lambda: store.offers)
    stores.registered("prefill-1", store.registration(epoch=EPOCH + 1))
    store.gate.set()
    await until(lambda: dropped(workers, "STORE_UNAVAILABLE") == 3)
    assert not stores.resting("prefill-1")
    store.fail = None
    offers.offer(KEYS[:3], "")
    await until(lambda: offered(workers, "stored") == 3)


async def test_a_store_without_room_is_not_pressed(workers: Pair, store: ScriptedStore) -> None:
    store.refuse = "NO_CAPACITY"
    workers.decode.serving.offers.offer(KEYS[:30], "")
    await until(lambda: dropped(workers, "given_up") == 18)
    assert offered(workers, "NO_CAPACITY") == 12


async def test_a_store_of_another_layout_is_no_store(workers: Pair, store: ScriptedStore) -> None:
    workers.decode.serving.stores.registered("prefill-1", store.registration(fingerprint="other"))
    workers.decode.serving.offers.offer(KEYS[:3], "")
    assert dropped(workers, "no_store") == 3


async def test_a_stream_offers_prompt_and_output_at_its_end(workers: Pair, store: ScriptedStore) -> None:
    prompt = list(range(1, 2 * BLOCK + 2))
    output = [token(prompt, 0, i) for i in range(8)]
    keys = block_keys(bytes(16), [*prompt, *output[:-1]], BLOCK)
    workers.decode.engine.cached = set(keys)
    await workers.client.submit("r", prompt, pb.Plan(mode=pb.MODE_LOCAL), max_tokens=8)
    await workers.client.until("r")
    await until(lambda: store.keys == set(keys))


async def test_a_stream_that_runs_is_offered_as_it_grows(workers: Pair, store: ScriptedStore) -> None:
    prompt = list(range(1, 2 * BLOCK + 2))
    await workers.client.submit("r", prompt, pb.Plan(mode=pb.MODE_LOCAL), max_tokens=8)
    await workers.client.first("r")
    workers.decode.engine.gate.clear()
    workers.decode.engine.cached = set(block_keys(bytes(16), prompt, BLOCK))
    await until(lambda: len(store.keys) >= 2)
    workers.decode.engine.gate.set()
    await workers.client.until("r")


async def test_a_prefill_worker_offers_the_prompt(workers: Pair, store: ScriptedStore) -> None:
    prompt = list(range(1, 3 * BLOCK + 2))
    keys = block_keys(bytes(16), prompt, BLOCK)
    workers.prefill.engine.cached = set(keys)
    await workers.client.submit("r", prompt, workers.plan())
    await workers.client.until("r")
    await until(lambda: set(keys) <= store.keys)
    assert store.offers[0].peer.owner == "prefill-1"
