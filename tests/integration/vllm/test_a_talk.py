"""The next turn of a talk: what one vLLM worker has answered, another reads from a store and does not compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from baton.kv.keys import block_keys
from baton.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.v1 import worker_pb2 as pb
from tests.integration.plans import LOCAL, disaggregated, prompt, target
from tests.integration.vllm.conftest import VllmFleet
from tests.tiny_model import greedy
from tests.worker_process import HANG_S, Frontend, WorkerProcess, frontend, settle

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 32
LENGTHS = (5, 31, 64, 90, 200, 330)
"""Of the prompts: tails of every kind, in one chunk and in several."""


@pytest.fixture
async def store(fleet: VllmFleet, tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    """A store that the fleet's workers offer to."""
    with WorkerProcess("kvstore", "kvstore-vllm", tmp_path, etcd=fleet.etcd, capacity_gib=0.1) as process:
        yield process
        process.kill()


async def clear(worker: Frontend, process: WorkerProcess) -> None:
    """Forget every block, in staging and in vLLM."""
    await settle(process)
    await worker.worker.ClearCache(pb.ClearCacheRequest(), timeout=HANG_S)


async def announced(worker: Frontend, wanted: set[bytes]) -> None:
    """Wait until a router that watches the worker knows of all these blocks."""
    known: set[bytes] = set()
    call = worker.worker.Watch(pb.WatchRequest(), timeout=HANG_S)
    async for update in call:
        known = (set() if update.cache.cleared else known) - set(update.cache.removed) | set(update.cache.stored)
        if wanted <= known:
            call.cancel()
            return
    raise AssertionError(f"{len(wanted - known)} of {len(wanted)} blocks are not announced")


async def stored(store: WorkerProcess, wanted: set[bytes], fingerprint: str) -> None:
    """Wait until the store has all these blocks."""
    async with grpc.aio.insecure_channel(store.address) as channel, asyncio.timeout(HANG_S):
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        for key in wanted:
            while True:
                call = stub.Lookup(kvstore_pb2.LookupRequest(keys=[key], fingerprint=fingerprint), timeout=HANG_S)
                found = len((await call.read()).handles)
                call.cancel()
                if found:
                    break
                await asyncio.sleep(0.1)


async def test_the_next_turn_is_read_from_a_store(fleet: VllmFleet, store: WorkerProcess) -> None:
    prompts = {n: prompt(n, 600) for n in LENGTHS}
    async with frontend(fleet.decode) as decode, frontend(fleet.prefill) as prefill:
        plans = [LOCAL if i % 2 else disaggregated(fleet.prefill) for i in range(len(LENGTHS))]
        answers = await asyncio.gather(
            *(
                decode.run(f"turn-1-{n}", prompts[n], plan, max_tokens=100)
                for n, plan in zip(LENGTHS, plans, strict=True)
            )
        )
        talks = {n: [*prompts[n], *answer.tokens[0]] for n, answer in zip(LENGTHS, answers, strict=True)}
        # The last token has no KV, nor what it would complete.
        keys = {n: block_keys(decode.root(), talk[:-1], BLOCK) for n, talk in talks.items()}
        every = {key for found in keys.values() for key in found}
        await announced(decode, every)
        await stored(store, every, decode.described.fingerprint)
        for n, talk in talks.items():
            plan = disaggregated(fleet.prefill)
            plan.store.CopyFrom(target(store))
            plan.stored_tokens, plan.store_tier = len(keys[n]) * BLOCK, "host"
            turn = [*talk, *prompt(40, 601 + n)]
            expected = greedy(fleet.model, turn, 16)
            tries = 0
            async with asyncio.timeout(HANG_S):
                while True:  # a worker does not wait for a store for longer than it would compute, a moment here
                    tries += 1
                    await clear(decode, fleet.decode)
                    await clear(prefill, fleet.prefill)
                    result = await decode.run(f"turn-2-{n}", turn, plan, attempt=tries)
                    assert result.tokens == {0: expected}, n
                    assert result.route is not None
                    if result.route.stored_tokens == len(keys[n]) * BLOCK:
                        break
