"""Requests that end before their time, at every point of a hand-over: both pools are empty again afterwards."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.v1 import worker_pb2 as pb
from tests.faults.conftest import Fleet
from tests.faults.fleet import FREED_S, empty, handed_over, prompt, real_run
from tests.faults.proxy import proxy
from tests.scripted_prefill import ScriptedPrefill, Write, hold
from tests.worker_process import HANG_S, Frontend, WorkerProcess, frontend, integrity, settle

pytestmark = pytest.mark.integration

TIMES = 100
AT_ONCE = 10


@pytest.mark.parametrize("stage", ["queued", "prefilling", "transferring", "decoding"])
async def test_abort(fleet: Fleet, scripted: ScriptedPrefill, stage: str) -> None:
    """A hundred times in each stage, ten at a time."""
    reached: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def script(request: pb.RunRequest, write: Write) -> None:
        uid = request.attempt.uid
        if stage == "queued":
            reached[uid].set()
            await hold()
        async with real_run(fleet.prefill, request) as events:
            async for event in events:
                await write(event)
                if event.HasField("accepted") if stage == "prefilling" else event.blocks.handles:
                    reached[uid].set()

    scripted.script = script
    found: list[bool] = []
    random_ = random.Random(stage)

    async def one(decode: Frontend, i: int) -> None:
        uid = f"abort-{stage}-{i}"
        ids = prompt(random_.randrange(40, 1200), uid)
        reply = await decode.submit(decode.attempt(uid, ids, max_tokens=800), handed_over(scripted))
        assert not reply.HasField("failure"), reply.failure
        if stage == "decoding":
            await anext(decode.events(uid))
        else:
            await asyncio.wait_for(reached[uid].wait(), HANG_S)
        await asyncio.sleep(random_.choice((0.0, 0.001, 0.004)))
        found.append(await decode.abort(uid))

    async with frontend(fleet.decode) as decode:
        for first in range(0, TIMES, AT_ONCE):
            await asyncio.gather(*(one(decode, i) for i in range(first, first + AT_ONCE)))
        assert found == [True] * TIMES, "some had ended before"
        assert await settle(fleet.decode, fleet.prefill) < FREED_S
    await empty(fleet.decode, fleet.prefill)


async def test_client_and_prefill_leave_at_once(fleet: Fleet) -> None:
    """The client aborts in the very moment in which the connection to prefill is reset, at any point of a hand-over."""
    random_ = random.Random(5)
    async with proxy(fleet.prefill.address) as wire, frontend(fleet.decode) as decode:
        plan = handed_over(fleet.prefill)
        plan.prefill.address = wire.address
        for i in range(50):
            uid = f"both-{i}"
            await decode.submit(decode.attempt(uid, prompt(random_.randrange(100, 1500), uid), max_tokens=800), plan)
            await asyncio.sleep(random_.random() * 0.08)
            await _in_one_instant(random_, wire.cut, decode, uid)
        assert await settle(fleet.decode, fleet.prefill) < FREED_S
        assert wire.connections >= 10
    await empty(fleet.decode, fleet.prefill)


async def test_client_and_run_end_at_once(fleet: Fleet, scripted: ScriptedPrefill) -> None:
    """The client aborts in the very moment in which Run ends from the other side."""
    random_ = random.Random(6)
    ends: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def script(request: pb.RunRequest, write: Write) -> None:
        async def pass_on() -> None:
            async with real_run(fleet.prefill, request) as events:
                async for event in events:
                    await write(event)

        passing = asyncio.create_task(pass_on())
        try:
            await ends[request.attempt.uid].wait()
        finally:
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)

    scripted.script = script
    async with frontend(fleet.decode) as decode:
        for i in range(50):
            uid = f"run-{i}"
            ids = prompt(random_.randrange(100, 1500), uid)
            await decode.submit(decode.attempt(uid, ids, max_tokens=800), handed_over(scripted))
            await asyncio.sleep(random_.random() * 0.08)
            await _in_one_instant(random_, ends[uid].set, decode, uid)
        assert await settle(fleet.decode, fleet.prefill) < FREED_S
    await empty(fleet.decode, fleet.prefill)


async def _in_one_instant(random_: random.Random, leave: Callable[[], object], decode: Frontend, uid: str) -> None:
    async def later(pause: float) -> None:
        await asyncio.sleep(pause)
        leave()

    async def abort(pause: float) -> None:
        await asyncio.sleep(pause)
        await decode.abort(uid)

    await asyncio.gather(later(random_.random() * 0.003), abort(random_.random() * 0.003))


async def test_clients_abort_while_prefill_is_killed(
    fleet: Fleet, tmp_path: Path, worker_flags: dict[str, object]
) -> None:
    """kill -9 under eight hand-overs whose clients all leave at that moment."""
    flags = {**worker_flags, "served_name": "smollm2-135m-instruct"}
    with WorkerProcess("prefill", "prefill-both", tmp_path, **flags) as spare:
        async with frontend(fleet.decode) as decode:
            uids = [f"killed-{i}" for i in range(8)]
            for uid in uids:
                attempt = decode.attempt(uid, prompt(1500, uid), max_tokens=100)
                await decode.submit(attempt, handed_over(spare, local=True))
            await asyncio.sleep(0.05)
            spare.process.kill()
            await asyncio.gather(*(decode.abort(uid) for uid in uids))
            assert await settle(fleet.decode) < FREED_S
    await empty(fleet.decode)


def _no_block(event: pb.RunEvent) -> None:
    for handle in event.blocks.handles:
        handle.segments[0].offset = 1 << 40


def _other_layout(event: pb.RunEvent) -> None:
    for handle in event.blocks.handles:
        handle.fingerprint = "another"


def _no_token(event: pb.RunEvent) -> None:
    for first in event.done.first:
        first.token_id = 1 << 20


@pytest.mark.parametrize(
    ("edit", "reason"),
    [(_no_block, "KV_BAD_HANDLE"), (_other_layout, "KV_LAYOUT_MISMATCH"), (_no_token, "PREFILL_UNAVAILABLE")],
)
async def test_refused_after_prefill_held_blocks(
    fleet: Fleet, scripted: ScriptedPrefill, edit: Callable[[pb.RunEvent], None], reason: str
) -> None:
    """Decode finds out late that it cannot go on: prefill, which holds the whole prompt, is free again at once."""

    async def script(request: pb.RunRequest, write: Write) -> None:
        async with real_run(fleet.prefill, request) as events:
            told: list[pb.RunEvent] = []
            async for event in events:
                edit(event)
                told.append(event)
                if event.HasField("done"):
                    assert await integrity(fleet.prefill.address), "it holds nothing"
                    for one in told:
                        await write(one)

    scripted.script = script
    async with frontend(fleet.decode) as decode:
        result = await decode.run(
            f"late-{reason}", prompt(900, reason), handed_over(scripted), fallback=pb.FALLBACK_STRICT
        )
        assert result.failure == reason
        assert not result.tokens
        took = await settle(fleet.prefill, fleet.decode)
    print(f"{reason}: free after {1000 * took:.0f} ms")
    assert took < FREED_S
