"""Prefill is killed after decode was dispatched: after it accepted, after its first blocks, after its first token."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from baton.v1 import worker_pb2 as pb
from tests.faults.conftest import Fleet, Oracle
from tests.faults.fleet import counted, empty, handed_over, prompt
from tests.integration.stack import SERVED
from tests.scripted_prefill import ScriptedPrefill, Write, hold
from tests.worker_process import HANG_S, WorkerProcess, frontend, integrity

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("moment", ["accepted", "first blocks", "first token"])
async def test_prefill_is_killed(
    fleet: Fleet, tmp_path: Path, worker_flags: dict[str, object], greedy: Oracle, moment: str
) -> None:
    prompts = [prompt(1800, moment, i) for i in range(6)]
    with WorkerProcess("prefill", "prefill-lost", tmp_path, **{**worker_flags, "served_name": SERVED}) as spare:
        async with frontend(fleet.decode) as decode, asyncio.timeout(HANG_S):
            moved = await counted(fleet.decode, "transfer_bytes_total")
            for i, ids in enumerate(prompts):
                plan = handed_over(spare, fleet.alternate if i % 2 else None, local=True)
                reply = await decode.submit(decode.attempt(f"{moment}-{i}", ids, max_tokens=12), plan)
                assert not reply.HasField("failure"), reply.failure
            strict = decode.attempt(f"{moment}-strict", prompt(1800, moment, "strict"))
            await decode.submit(strict, handed_over(spare, local=True), fallback=pb.FALLBACK_STRICT)
            if moment == "accepted":
                while not await integrity(spare.address):
                    pass
            elif moment == "first blocks":
                while await counted(fleet.decode, "transfer_bytes_total") == moved:
                    pass
            else:
                await decode.frame(lambda frame: any(event.tokens.ids for event in frame.events))
            spare.kill()
            results = [await decode.collect(f"{moment}-{i}") for i in range(len(prompts))]
            refused = await decode.collect(f"{moment}-strict")
    assert [r.tokens[0] for r in results] == [greedy(ids, 12) for ids in prompts]
    reasons = {reason for r in results if r.route is not None for reason in r.route.reasons[1:]}
    assert reasons & {"KV_LEASE_LOST", "PREFILL_UNAVAILABLE", "KV_TRANSFER_FAILED"}, "the kill came too late"
    assert refused.failure in ("KV_LEASE_LOST", "PREFILL_UNAVAILABLE", "KV_TRANSFER_FAILED")
    await empty(fleet.decode, fleet.alternate)


async def test_a_prefill_that_does_not_accept_holds_up_no_resume(
    fleet: Fleet, scripted: ScriptedPrefill, greedy: Oracle
) -> None:
    async def silent(request: pb.RunRequest, write: Write) -> None:
        await hold()

    scripted.script = silent
    ids = prompt(300, "silent")
    whole = greedy(ids, 12)
    async with frontend(fleet.decode) as decode, asyncio.timeout(HANG_S):
        resumed = decode.attempt("silent", ids, attempt=2, emitted=whole[:5], max_tokens=12)
        reply = await decode.submit(resumed, handed_over(scripted, fleet.alternate))
        assert not reply.HasField("failure"), reply.failure
        tokens: list[int] = []
        async for event in decode.events("silent", attempt=2):
            assert event.offset == 5 + len(tokens)
            tokens += event.tokens.ids
            if event.finish:
                break
    assert tokens == whole[5:]
    assert list(event.route.reasons) == ["DISAGGREGATED", "PREFILL_UNAVAILABLE", "ALTERNATE_PREFILL"]
    assert "said nothing for 0.5 s" in fleet.decode.log()
    await empty(fleet.decode, fleet.alternate)


async def test_a_prefill_that_stops_after_accepting_is_left_before_pairing_gives_up(
    fleet: Fleet, scripted: ScriptedPrefill, greedy: Oracle
) -> None:
    """It is there for gRPC's sake only: the peer that it names never answers."""

    async def accepts(request: pb.RunRequest, write: Write) -> None:
        accepted = scripted.accepted()
        accepted.accepted.peer.metadata["tcp"] = deaf
        await write(accepted)
        await hold()

    scripted.script = accepts
    ids = prompt(300, "stops after accepting")
    with socket.socket() as listener:  # connections wait in its queue for ever
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        deaf = f"127.0.0.1:{listener.getsockname()[1]}".encode()
        async with frontend(fleet.decode) as decode, asyncio.timeout(HANG_S):
            result = await decode.run("accepts", ids, handed_over(scripted, fleet.alternate), max_tokens=6)
    assert result.tokens == {0: greedy(ids, 6)}
    assert result.route is not None
    assert list(result.route.reasons) == ["DISAGGREGATED", "PREFILL_UNAVAILABLE", "ALTERNATE_PREFILL"]
    assert "said nothing for 1.5 s" in fleet.decode.log()
    await empty(fleet.decode, fleet.alternate)
