"""Offers over a transport that the test controls: late reads, failures, cancellation, waiting in line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment, checksum
from baton.rpc.tasks import Background
from baton.transfer.port import BlockRead, Peer, ReadReport
from baton.transfer.transports import Transports
from services.kvstore.eviction import Watermarks
from services.kvstore.host import HostTier
from services.kvstore.metrics import KvStoreMetrics
from services.kvstore.offers import Offers
from services.kvstore.store import Store

BLOCK = 128
SLOTS = 8
HANG_S = 30.0
PEER = Peer("writer", 5, 1 << 20, {})


def payload(key: bytes) -> bytes:
    return (key * BLOCK)[:BLOCK]


def handle(number: int, **changes: object) -> Handle:
    key = number.to_bytes(16, "big")
    fields: dict[str, object] = {
        "key": key,
        "fingerprint": "fp",
        "owner": "writer",
        "epoch": 5,
        "generation": 1,
        "tokens": 32,
        "segments": (Segment(0, number * BLOCK, BLOCK),),
        "checksum": checksum(key, 5, 1, payload(key)),
    }
    return Handle(**{**fields, **changes})  # type: ignore[arg-type]


class HeldTransport:
    """Reads end when `go` is set; `fates` says how, by key."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.go = asyncio.Event()
        self.go.set()
        self.fates: dict[bytes, Reason] = {}
        self.late: set[bytes] = set()
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_their_way: set[int] = set()
        self.reading = 0
        self.most = 0
        self.batches: list[list[bytes]] = []
        self.pair_fails: BatonError | None = None

    async def pair(self, peer: Peer, deadline: float) -> None:
        if self.pair_fails:
            raise self.pair_fails

    async def read(self, handles: Sequence[Handle], into: Sequence[int], deadline: float) -> ReadReport:
        self.batches.append([h.key for h in handles])
        self.reading += 1
        self.most = max(self.most, self.reading)
        self.on_their_way |= set(into)
        try:
            await self.go.wait()
        finally:
            self.reading -= 1
        blocks, late = [], []
        for item, offset in zip(handles, into, strict=True):
            reason = self.fates.get(item.key)
            if item.key in self.late:
                late.append(offset)
                reason = Reason.KV_TRANSFER_TIMEOUT
            else:
                self.on_their_way.discard(offset)
            if reason is None:
                self.arena.view(offset, BLOCK)[:] = payload(item.key)
            blocks.append(BlockRead(item, offset, reason))
        return ReadReport(blocks, 0, 0.0, late, self.settled if late else None)

    def quarantined(self) -> frozenset[int]:
        return frozenset(self.on_their_way)


class Bench:
    def __init__(self) -> None:
        arena = Arena.create(SLOTS * BLOCK)
        self.transport = HeldTransport(arena)
        self.host = HostTier(arena, "store", 9, Watermarks(1.0, 0.75))
        self.background = Background("test")
        metrics = KvStoreMetrics(CollectorRegistry())
        self.offers = Offers(
            Store(self.host, (), (), self.background, metrics),
            cast(Transports, self.transport),
            self.background,
            metrics,
            at_once=2,
            waiting=3,
        )

    async def until_reading(self, count: int) -> None:
        async with asyncio.timeout(HANG_S):
            while self.transport.reading != count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    found = Bench()
    yield found
    assert found.offers.open == 0
    assert found.host.check_integrity() == []
    assert found.host.stats().used_bytes == (found.host.stats().blocks + found.host.quarantined) * BLOCK
    await found.background.close()


async def test_stored_blocks_are_sealed_under_the_stores_own_name(bench: Bench) -> None:
    outcome = await bench.offers.take(PEER, [handle(0), handle(1)], 5.0)
    assert (outcome.stored, outcome.known, +outcome.refused) == (2, 0, {})
    pinned = bench.host.pin([handle(0).key, handle(1).key], "fp")
    first = pinned[0]
    assert (first.handle.owner, first.handle.epoch, first.handle.tokens) == ("store", 9, 32)
    again = checksum(first.handle.key, 9, first.handle.generation, bench.host.view(first.slot))
    assert first.handle.checksum == again
    bench.host.unpin(pinned)


async def test_a_late_slot_waits_until_the_read_has_settled(bench: Bench) -> None:
    bench.transport.late = {handle(1).key}
    outcome = await bench.offers.take(PEER, [handle(0), handle(1), handle(2)], 5.0)
    assert outcome.stored == 2
    assert outcome.refused[Reason.KV_TRANSFER_TIMEOUT] == 1
    assert bench.host.quarantined == 1
    late = bench.transport.on_their_way.copy()
    # whatever is offered now, the late slot is not used
    bench.transport.late = set()
    more = await bench.offers.take(PEER, [handle(n) for n in range(3, 3 + SLOTS)], 5.0)
    assert more.stored < SLOTS
    held = bench.host.pin([handle(n).key for n in range(3, 3 + SLOTS)], "fp")
    assert not late & {entry.slot.offset for entry in held}
    bench.host.unpin(held)
    bench.transport.settled.set_result(None)
    await asyncio.sleep(0)
    assert bench.host.quarantined == 0


async def test_each_block_has_its_own_fate(bench: Bench) -> None:
    bench.transport.fates = {handle(1).key: Reason.KV_CHECKSUM_MISMATCH, handle(2).key: Reason.KV_STALE_EPOCH}
    outcome = await bench.offers.take(PEER, [handle(n) for n in range(4)], 5.0)
    assert outcome.stored == 2
    assert +outcome.refused == {Reason.KV_CHECKSUM_MISMATCH: 1, Reason.KV_STALE_EPOCH: 1}
    assert bench.host.holds(handle(3).key)


async def test_a_peer_that_cannot_be_paired_costs_no_slot(bench: Bench) -> None:
    bench.transport.pair_fails = BatonError(Reason.KV_TRANSFER_FAILED, "refused")
    outcome = await bench.offers.take(PEER, [handle(0), handle(1)], 5.0)
    assert outcome.stored == 0
    assert +outcome.refused == {Reason.KV_TRANSFER_FAILED: 2}


async def test_the_same_block_from_two_is_read_once(bench: Bench) -> None:
    bench.transport.go.clear()
    first = asyncio.create_task(bench.offers.take(PEER, [handle(0), handle(1)], 5.0))
    await bench.until_reading(1)
    second = asyncio.create_task(bench.offers.take(PEER, [handle(1), handle(2), handle(2)], 5.0))
    await bench.until_reading(2)
    bench.transport.go.set()
    one, two = await asyncio.gather(first, second)
    assert (one.stored, one.known) == (2, 0)
    assert (two.stored, two.known) == (1, 2)
    assert sorted(key for batch in bench.transport.batches for key in batch) == [handle(n).key for n in range(3)]


async def test_a_caller_that_leaves_does_not_stop_the_read(bench: Bench) -> None:
    bench.transport.go.clear()
    task = asyncio.create_task(bench.offers.take(PEER, [handle(0)], 5.0))
    await bench.until_reading(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.offers.open == 1
    bench.transport.go.set()
    async with asyncio.timeout(HANG_S):
        while bench.offers.open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert bench.host.holds(handle(0).key)


async def test_waiting_in_line_is_bounded_and_ends_with_the_deadline(bench: Bench) -> None:
    bench.transport.go.clear()
    reading = [asyncio.create_task(bench.offers.take(PEER, [handle(n)], 20.0)) for n in range(2)]
    await bench.until_reading(2)
    impatient = asyncio.create_task(bench.offers.take(PEER, [handle(2)], 0.05))
    waiting = [asyncio.create_task(bench.offers.take(PEER, [handle(n)], 20.0)) for n in (3, 4)]
    await asyncio.sleep(0)
    with pytest.raises(BatonError) as refused:
        await bench.offers.take(PEER, [handle(5)], 20.0)
    assert refused.value.reason is Reason.NO_CAPACITY
    with pytest.raises(BatonError) as late:
        await impatient
    assert late.value.reason is Reason.DEADLINE_EXCEEDED
    bench.transport.go.set()
    outcomes = await asyncio.gather(*reading, *waiting)
    assert [outcome.stored for outcome in outcomes] == [1, 1, 1, 1]
    assert bench.transport.most == 2


async def test_closing_in_the_middle_frees_nothing_that_bytes_may_still_reach() -> None:
    bench = Bench()
    bench.transport.go.clear()
    task = asyncio.create_task(bench.offers.take(PEER, [handle(0), handle(1)], 20.0))
    await bench.until_reading(1)
    await bench.background.close()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert bench.host.quarantined == 2
    assert bench.host.check_integrity() == []
    assert bench.offers.open == 0


async def test_a_block_of_another_size_is_refused_alone(bench: Bench) -> None:
    odd = handle(1, segments=(Segment(0, 0, 2 * BLOCK),))
    wide = handle(2, tokens=64)
    outcome = await bench.offers.take(PEER, [handle(0), odd, wide], 5.0)
    assert outcome.stored == 1
    assert +outcome.refused == {Reason.KV_BAD_HANDLE: 2}


@pytest.mark.parametrize(
    "offered",
    [
        [],
        [handle(0, owner="other")],
        [handle(0, epoch=6)],
        [handle(0, key=b"k")],
        [handle(0), handle(1, fingerprint="other")],
        [handle(0, fingerprint="")],
        [handle(0, tokens=31)],
        [handle(0, tokens=0)],
        [handle(0, segments=())],
        [handle(0)] * 4097,
    ],
    ids=lambda handles: f"{len(handles)} handles",
)
async def test_wrong_offers_are_refused_before_anything_is_taken(bench: Bench, offered: list[Handle]) -> None:
    with pytest.raises(BatonError) as refused:
        await bench.offers.take(PEER, offered, 5.0)
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert bench.host.shape is None


async def test_an_offer_without_a_deadline_has_ours(bench: Bench) -> None:
    began = time.monotonic()
    assert (await bench.offers.take(PEER, [handle(0)], 0.0)).stored == 1
    assert time.monotonic() - began < HANG_S
