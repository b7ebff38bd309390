"""A decode worker that is told where KV lies by a prefill that lies, errs or has moved on: nothing of it is used."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.kv.handle import Handle, Segment
from baton.rpc.codec import handle_from_pb, handle_to_pb
from baton.v1 import worker_pb2 as pb
from tests.faults.conftest import Fleet, Oracle
from tests.faults.fleet import counted, handed_over, prompt, real_run
from tests.scripted_prefill import ScriptedPrefill, Write, hold, run_request
from tests.worker_process import HANG_S, frontend

pytestmark = pytest.mark.integration

Forge = Callable[[Handle, Handle], Handle]
"""(the handle of block 2, the handle of block 0) -> what is said of block 2."""


def changed(**fields: object) -> Forge:
    return lambda handle, _: replace(handle, **fields)


def segments(*at: tuple[int, int, int]) -> Forge:
    """(region, offset from where the block lies, length less than the block's)."""

    def forge(handle: Handle, _: Handle) -> Handle:
        (true,) = handle.segments
        found = (Segment(region, true.offset + offset, true.length - less) for region, offset, less in at)
        return replace(handle, segments=tuple(found))

    return forge


def halves(handle: Handle, _: Handle) -> Handle:
    (true,) = handle.segments
    half = true.length // 2
    return replace(handle, segments=(Segment(0, true.offset + half, half), Segment(0, true.offset, half)))


def crumbs(handle: Handle, _: Handle) -> Handle:
    (true,) = handle.segments
    return replace(handle, segments=tuple(Segment(0, true.offset + i, 1) for i in range(true.length)))


FORGERIES: dict[str, tuple[Forge, str]] = {
    "key of another block": (lambda handle, other: replace(handle, key=other.key), "KV_BAD_HANDLE"),
    "key of nothing": (changed(key=b""), "KV_BAD_HANDLE"),
    "fewer tokens": (changed(tokens=31), "KV_BAD_HANDLE"),
    "no tokens": (changed(tokens=0), "KV_BAD_HANDLE"),
    "layout": (changed(fingerprint="another"), "KV_LAYOUT_MISMATCH"),
    "unknown owner": (changed(owner="nobody"), "KV_STALE_EPOCH"),
    "reader itself": (changed(owner="decode-1"), "KV_STALE_EPOCH"),
    "no epoch": (changed(epoch=0), "KV_STALE_EPOCH"),
    "earlier epoch": (lambda handle, _: replace(handle, epoch=handle.epoch ^ 2), "KV_STALE_EPOCH"),
    "earlier tenant": (lambda h, _: replace(h, generation=h.generation - 1), "KV_CHECKSUM_MISMATCH"),
    "later tenant": (changed(generation=2**64 - 1), "KV_CHECKSUM_MISMATCH"),
    "no checksum": (changed(checksum=0), "KV_CHECKSUM_MISMATCH"),
    "another algorithm": (changed(algorithm="crc32"), "KV_BAD_HANDLE"),
    "bytes of another block": (lambda h, other: replace(h, segments=other.segments), "KV_CHECKSUM_MISMATCH"),
    "one byte off": (segments((0, 1, 0)), "KV_CHECKSUM_MISMATCH"),
    "halves exchanged": (halves, "KV_CHECKSUM_MISMATCH"),
    "one byte short": (segments((0, 0, 1)), "KV_BAD_HANDLE"),
    "one byte long": (segments((0, 0, -1)), "KV_BAD_HANDLE"),
    "beyond the arena": (segments((0, 1 << 40, 0)), "KV_BAD_HANDLE"),
    "around the end of the address space": (segments((0, 2**64 - 2**30, 0)), "KV_BAD_HANDLE"),
    "another region": (segments((1, 0, 0)), "KV_BAD_HANDLE"),
    "no segment": (segments(), "KV_BAD_HANDLE"),
    "the block twice": (segments((0, 0, 0), (0, 0, 0)), "KV_BAD_HANDLE"),
    "a segment a byte": (crumbs, "KV_BAD_HANDLE"),
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_forged_handle(fleet: Fleet, scripted: ScriptedPrefill, greedy: Oracle, name: str) -> None:
    """The run is left with the reason; what was verified is kept, the rest comes from the alternate."""
    forge, reason = FORGERIES[name]
    ids = prompt(150, name)

    async def script(request: pb.RunRequest, write: Write) -> None:
        first: Handle | None = None
        async with real_run(fleet.prefill, request) as events:
            async for event in events:
                for i, message in enumerate(event.blocks.handles, start=event.blocks.first_block):
                    handle = handle_from_pb(message)
                    first = first or handle
                    if i == 2:
                        message.CopyFrom(handle_to_pb(forge(handle, first)))
                if not event.HasField("done"):  # before any token, so that the alternate may be tried
                    await write(event)

    scripted.script = script
    before = await counted(fleet.decode, "handovers_total", result=reason)
    async with frontend(fleet.decode) as decode:
        result = await decode.run(f"forged-{name}", ids, handed_over(scripted, fleet.alternate))
    assert result.tokens == {0: greedy(ids, 16)}
    assert result.route is not None
    assert result.route.reasons[-1] == "ALTERNATE_PREFILL"
    assert result.route.loaded_tokens == len(ids), "two good blocks from the first, the rest from the alternate"
    assert await counted(fleet.decode, "handovers_total", result=reason) == before + 1


def _skip_a_block(event: pb.RunEvent) -> list[pb.RunEvent]:
    if event.HasField("blocks"):
        event.blocks.first_block += 1
    return [event]


def _too_many(event: pb.RunEvent) -> list[pb.RunEvent]:
    if event.HasField("blocks"):
        event.blocks.handles.extend(list(event.blocks.handles) * 3)
    return [event]


def _twice(event: pb.RunEvent) -> list[pb.RunEvent]:
    return [event, event]


def _nothing_but_the_end(event: pb.RunEvent) -> list[pb.RunEvent]:
    return [] if event.HasField("blocks") else [event]


def _first(**fields: object) -> Callable[[pb.RunEvent], list[pb.RunEvent]]:
    def forge(event: pb.RunEvent) -> list[pb.RunEvent]:
        for first in event.done.first:
            for name, value in fields.items():
                setattr(first, name, value)
        return [event]

    return forge


def _no_first(event: pb.RunEvent) -> list[pb.RunEvent]:
    if event.HasField("done"):
        del event.done.first[:]
    return [event]


def _first_twice(event: pb.RunEvent) -> list[pb.RunEvent]:
    if event.HasField("done"):
        event.done.first.extend(list(event.done.first))
    return [event]


STORIES: dict[str, tuple[Callable[[pb.RunEvent], list[pb.RunEvent]], set[str]]] = {
    "a gap": (_skip_a_block, {"KV_TRANSFER_FAILED"}),
    "more blocks than the prompt has": (_too_many, {"KV_TRANSFER_FAILED"}),
    "everything twice": (_twice, set()),
    "no blocks": (_nothing_but_the_end, {"KV_LEASE_LOST"}),
    "a first token outside the vocabulary": (_first(token_id=320), {"PREFILL_UNAVAILABLE"}),
    "a first token of another choice": (_first(choice=1), {"PREFILL_UNAVAILABLE"}),
    "a first token with an unknown end": (_first(finish="bored"), {"PREFILL_UNAVAILABLE"}),
    "no first token": (_no_first, {"PREFILL_UNAVAILABLE"}),
    "two first tokens for one choice": (_first_twice, {"PREFILL_UNAVAILABLE"}),
}


@pytest.mark.parametrize("name", STORIES)
async def test_a_run_that_tells_an_impossible_story(
    fleet: Fleet, scripted: ScriptedPrefill, greedy: Oracle, name: str
) -> None:
    """Whatever it says, the text is right, and a token that reached the client is not sent again."""
    edit, reasons = STORIES[name]
    ids = prompt(150, name)

    async def script(request: pb.RunRequest, write: Write) -> None:
        async with real_run(fleet.prefill, request) as events:
            async for event in events:
                for told in edit(event):
                    await write(told)

    scripted.script = script
    async with frontend(fleet.decode) as decode:
        result = await decode.run(f"story-{name}", ids, handed_over(scripted, local=True))
    assert result.route is not None
    assert reasons <= set(result.route.reasons), result
    assert result.tokens == {0: greedy(ids, 16)}
    assert result.finish == {0: "length"}


async def test_handles_of_an_earlier_run(fleet: Fleet, scripted: ScriptedPrefill, greedy: Oracle) -> None:
    """Kept after their lease, and used when the slots hold another prompt: seen by the sum, never by luck."""
    ids = prompt(200, "expired")
    async with frontend(fleet.decode) as decode:
        await decode.run("warm", prompt(40, "warm"), handed_over(fleet.prefill))  # paired
        kept: list[pb.RunEvent] = []
        attempt = decode.attempt("kept", ids)
        async with real_run(fleet.prefill, run_request(attempt, decode.described)) as events:
            async for event in events:
                kept.append(event)
                if event.HasField("done"):
                    break
        await _reuse_every_slot(fleet)

        async def script(request: pb.RunRequest, write: Write) -> None:
            for event in kept:
                await write(event)
            await hold()

        scripted.script = script
        before = await counted(fleet.decode, "transfer_failures_total", reason="KV_CHECKSUM_MISMATCH")
        result = await decode.run("expired", ids, handed_over(scripted, local=True))
    assert result.tokens == {0: greedy(ids, 16)}
    assert result.route is not None
    assert list(result.route.reasons) == ["DISAGGREGATED", "KV_CHECKSUM_MISMATCH", "LOCAL_FALLBACK"]
    assert result.route.loaded_tokens == 0
    assert await counted(fleet.decode, "transfer_failures_total", reason="KV_CHECKSUM_MISMATCH") > before


async def _reuse_every_slot(fleet: Fleet) -> None:
    """Prompts of another kind through the whole pool of the prefill."""
    async with frontend(fleet.prefill) as prefill:
        await prefill.worker.ClearCache(pb.ClearCacheRequest(), timeout=HANG_S)
        total = int(await counted(fleet.prefill, "kv_blocks_total"))
        for i in range(total // 32 + 1):
            request = run_request(prefill.attempt(f"reuse-{i}", prompt(1024, "reuse", i)), prefill.described)
            async with real_run(fleet.prefill, request) as events:
                async for event in events:
                    if event.HasField("done"):
                        break


async def test_the_lease_ends_while_its_blocks_are_read(
    fleet: Fleet, scripted: ScriptedPrefill, greedy: Oracle
) -> None:
    """Run ends at any moment of the transfer: what is not here by then is computed, the text is the same."""
    moments = random.Random(3)
    kept = []
    async with frontend(fleet.decode) as decode:
        for i in range(50):
            ids = prompt(moments.randrange(200, 1200), "lease", i)
            last, pause = moments.randrange(len(ids) // 64), moments.choice((0.0, 0.0003, 0.001, 0.003))

            async def script(request: pb.RunRequest, write: Write, last: int = last, pause: float = pause) -> None:
                async with real_run(fleet.prefill, request) as events:
                    async for event in events:
                        await write(event)
                        if event.blocks.handles and event.blocks.first_block >= 2 * last:
                            await asyncio.sleep(pause)
                            return

            scripted.script = script
            result = await decode.run(f"lease-{i}", ids, handed_over(scripted, local=True), max_tokens=4)
            assert result.tokens == {0: greedy(ids, 4)}
            assert result.route is not None
            assert list(result.route.reasons[1:]) == ["KV_LEASE_LOST", "LOCAL_FALLBACK"]
            kept.append(result.route.loaded_tokens)
    assert len(set(kept)) > 5, "the leases ended at a few moments only"
