"""KV bytes that change after they were sealed: in the owner's pool, and on their way to the reader."""

from __future__ import annotations

import asyncio
import os

import pytest

from baton.v1 import kv_pb2
from baton.v1 import worker_pb2 as pb
from tests.faults.conftest import Fleet, Oracle
from tests.faults.fleet import arena_path, counted, handed_over, prompt, real_run
from tests.faults.proxy import proxy
from tests.scripted_prefill import ScriptedPrefill, Write, run_request
from tests.worker_process import WorkerProcess, frontend

pytestmark = pytest.mark.integration

MISMATCH = "KV_CHECKSUM_MISMATCH"


def flip(worker: WorkerProcess, handle: kv_pb2.Handle, at: int = 100) -> None:
    """Change one bit of a block in its owner's memory."""
    with arena_path(worker).open("r+b", buffering=0) as arena:
        where = handle.segments[0].offset + at
        (byte,) = os.pread(arena.fileno(), 1, where)
        os.pwrite(arena.fileno(), bytes([byte ^ 4]), where)


async def test_a_byte_flips_in_the_pool_of_prefill(fleet: Fleet, scripted: ScriptedPrefill, greedy: Oracle) -> None:
    """After the block was sealed and announced, before it is read."""
    ids = prompt(150, "flipped in the pool")

    async def script(request: pb.RunRequest, write: Write) -> None:
        held: list[pb.RunEvent] = []
        async with real_run(fleet.prefill, request) as events:
            async for event in events:
                if event.HasField("accepted"):
                    await write(event)
                elif event.HasField("done"):
                    flip(fleet.prefill, held[1].blocks.handles[0])
                    for earlier in [*held, event]:
                        await write(earlier)
                elif event.blocks.handles:
                    held.append(event)

    scripted.script = script
    before = await counted(fleet.decode, "transfer_failures_total", reason=MISMATCH)
    async with frontend(fleet.decode) as decode:
        result = await decode.run("pool", ids, handed_over(scripted, local=True))
    assert result.tokens == {0: greedy(ids, 16)}
    assert result.route is not None
    assert list(result.route.reasons) == ["DISAGGREGATED", MISMATCH, "LOCAL_FALLBACK"]
    assert await counted(fleet.decode, "transfer_failures_total", reason=MISMATCH) > before


async def test_a_byte_flips_in_a_cached_prefix_of_prefill(fleet: Fleet, greedy: Oracle) -> None:
    """Its first token would be drawn from bytes that no reader has verified: the block is computed again."""
    prefix = prompt(128, "flipped in the cache")
    handles: list[kv_pb2.Handle] = []
    before = await counted(fleet.prefill, "kv_blocks_corrupted_total")
    async with frontend(fleet.decode) as decode:
        request = run_request(decode.attempt("warm", prefix), decode.described)
        async with real_run(fleet.prefill, request) as events:
            async for event in events:
                handles += event.blocks.handles
                if event.HasField("done"):
                    break
        for at in range(3, handles[1].segments[0].length, 4):
            flip(fleet.prefill, handles[1], at)  # the exponents of all its numbers
        for i, cached in enumerate((32, 128)):
            ids = [*prefix, *prompt(20, "after the flip", i)]
            result = await decode.run(f"cache-{i}", ids, handed_over(fleet.prefill), fallback=pb.FALLBACK_STRICT)
            assert result.tokens == {0: greedy(ids, 16)}
            assert result.route is not None
            assert result.route.cached_tokens == cached
        while await counted(fleet.prefill, "kv_blocks_corrupted_total") == before:  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.1)  # its figures are refreshed each second


async def test_a_byte_flips_in_flight(fleet: Fleet, scripted: ScriptedPrefill, greedy: Oracle) -> None:
    """Over tcp, in the payload of a block."""
    ids = prompt(150, "flipped in flight")
    async with proxy() as wire:

        def disturb(offset: int, piece: bytearray) -> None:
            if offset <= 30_000 < offset + len(piece):
                piece[30_000 - offset] ^= 1

        wire.on_answer = disturb

        async def script(request: pb.RunRequest, write: Write) -> None:
            async with real_run(fleet.prefill, request) as events:
                async for event in events:
                    if event.HasField("accepted"):
                        wire.there = event.accepted.peer.metadata["tcp"].decode()
                        event.accepted.peer.metadata["tcp"] = wire.address.encode()
                        del event.accepted.peer.metadata["nixl"]
                    if not event.HasField("done"):
                        await write(event)

        scripted.script = script
        before = await counted(fleet.decode, "transfer_failures_total", reason=MISMATCH)
        async with frontend(fleet.decode) as decode:
            result = await decode.run("flight", ids, handed_over(scripted, fleet.alternate))
    assert wire.connections > 0
    assert result.tokens == {0: greedy(ids, 16)}
    assert result.route is not None
    assert list(result.route.reasons) == ["DISAGGREGATED", MISMATCH, "ALTERNATE_PREFILL"]
    assert result.route.loaded_tokens == len(ids)
    assert await counted(fleet.decode, "transfer_failures_total", reason=MISMATCH) == before + 1


@pytest.mark.parametrize("at_once", [True, False])
async def test_two_requests_share_a_block_whose_load_fails(
    fleet: Fleet, scripted: ScriptedPrefill, greedy: Oracle, at_once: bool
) -> None:
    """Neither uses it, and no later request finds it in decode's cache."""
    shared = prompt(128, "shared", at_once)
    prompts = [[*shared, *prompt(30, "own", i, at_once)] for i in range(3)]
    both = asyncio.Barrier(2)

    async def script(request: pb.RunRequest, write: Write) -> None:
        async with real_run(fleet.prefill, request) as events:
            async for event in events:
                for i, handle in enumerate(event.blocks.handles, start=event.blocks.first_block):
                    if i == 2:
                        handle.checksum ^= 1  # as if the bytes were others
                if event.blocks.first_block == 0 and event.blocks.handles and at_once:
                    await both.wait()
                if not event.HasField("done"):
                    await write(event)

    scripted.script = script
    plan = handed_over(scripted, local=True)
    async with frontend(fleet.decode) as decode:
        runs = [decode.run(f"shared-{at_once}-{i}", ids, plan, max_tokens=12) for i, ids in enumerate(prompts[:2])]
        results = list(await asyncio.gather(*runs)) if at_once else [await run for run in runs]
        later = await decode.run(f"shared-{at_once}-later", prompts[2], pb.Plan(mode=pb.MODE_LOCAL), max_tokens=12)
    assert [r.tokens[0] for r in [*results, later]] == [greedy(ids, 12) for ids in prompts]
    failed = [r for r in results if r.route is not None and MISMATCH in r.route.reasons]
    assert len(failed) == 2 if at_once else len(failed) >= 1
