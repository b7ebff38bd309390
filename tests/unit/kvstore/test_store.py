"""The tiers together: what goes below, what comes up, who holds it, and what every failure of the disk looks like."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import CollectorRegistry, generate_latest

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.rpc.tasks import Background
from services.kvstore.aligned import ALIGN
from services.kvstore.breaker import Breaker
from services.kvstore.events import Change
from services.kvstore.eviction import Watermarks
from services.kvstore.host import HostTier
from services.kvstore.metrics import KvStoreMetrics
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.promotion import Hold
from services.kvstore.service import KvStoreService
from services.kvstore.store import Store, Verified
from services.kvstore.tier import BlockShape, Facts
from tests.unit.kvstore.disks import BreakableDisk

BLOCK = 4096
SHAPE = BlockShape("fp", BLOCK, 32)
HOST_SLOTS, DISK_SLOTS = 16, 64
HANG_S = 30.0


def keys(count: int, first: int = 0) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(first, first + count)]


def payload(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCK)


class Bench:
    """A store with a small host, a larger disk, and somebody who watches."""

    def __init__(self, folder: Path, ttl_s: float = 0.0, disk: bool = True) -> None:
        marks = Watermarks(1.0, 0.75)
        self.host = HostTier(Arena.create(HOST_SLOTS * BLOCK), "store", 7, marks)
        self.disk = BreakableDisk(folder, ALIGN + DISK_SLOTS * (ALIGN + BLOCK))
        self.registry = CollectorRegistry()
        self.metrics = KvStoreMetrics(self.registry)
        self.nvme = NvmeTier(self.disk, marks, {}, 0.5, Breaker(3, 0.05), self.metrics.tier("nvme"))
        self.background = Background("test")
        self.store = Store(self.host, [self.nvme], (), self.background, self.metrics, ttl_s, layout_rest_s=0.0)

    async def start(self) -> Bench:
        await self.nvme.open()
        await self.nvme.scan()
        self.background.spawn(self.store.writeback.run(), "write-behind")
        return self

    def offer(self, names: list[bytes], tenant: str = "", ttl_s: float = 0.0) -> int:
        """What an offer does, without the READ; how many were stored."""
        self.store.fix(SHAPE)
        names = [key for key in names if not self.host.holds(key)]
        facts = self.store.facts(tenant, ttl_s)
        done = []
        for key, slot in reversed(list(zip(names, self.host.reserve(len(names), tenant), strict=False))):
            self.host.view(slot)[:] = payload(key)
            self.host.commit(slot, key, self.host.sum(slot, key), facts)
            done.append(key)
        self.store.stored(done, facts)
        return len(done)

    async def look_up(self, names: list[bytes]) -> int:
        """Everything that can be had of a prompt, byte for byte; how many blocks."""
        hold = Hold(self.host)
        try:
            found = len(self.store.pin(hold, names, "fp"))
            many = self.store.bring(names[found:], "fp", hold)
            for key in names[found : found + many]:
                await self.store.promotions.wait(key)
                if (entry := hold.get(key)) is None:
                    break
                assert bytes(self.host.view(entry.slot)) == payload(key)
                assert self.host.intact(entry)
                found += 1
            return found
        finally:
            hold.close()

    async def push_below(self, names: list[bytes]) -> None:
        """Have these written to the disk, and out of the host."""
        for start in range(0, len(names), 2):
            self.offer(names[start : start + 2])
            await self.look_up(names[start : start + 2])
            await self.until(lambda: not self.store.writeback.open)
        self.host.drop(names)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    def exposed(self) -> str:
        """The metrics page."""
        return generate_latest(self.registry).decode()

    def outcome(self, outcome: str) -> float:
        found = self.metrics._promoted.labels(outcome)._value.get()
        return float(found)

    async def end(self) -> None:
        self.disk.go.set()
        await self.until(lambda: not self.store.promotions.open and not self.store.writeback.open)
        await self.until(lambda: not self.store.check_integrity())
        assert self.host.stats().pinned == 0
        await self.background.close()
        await self.nvme.close()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = await Bench(tmp_path).start()
    yield made
    await made.end()


async def test_a_second_sighting_writes_below_and_the_first_does_not(bench: Bench) -> None:
    bench.offer(keys(2))
    assert not bench.store.writeback.open
    await bench.look_up(keys(2))
    await bench.until(lambda: sorted(bench.nvme.keys()) == keys(2))
    assert bench.host.holds(keys(1)[0]), "a copy below does not take it away above"


async def test_known_offers_count_when_they_are_apart(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.offer(keys(2))
    bench.store.known(keys(2))
    assert not bench.store.writeback.open, "the decode worker offers what the prefill worker has offered"
    monkeypatch.setattr("services.kvstore.store.APART_S", 0.0)
    bench.store.known(keys(1))
    await bench.until(lambda: bench.nvme.keys() == keys(1))


async def test_a_whole_prompt_waits_in_line(bench: Bench) -> None:
    bench.offer(keys(12))
    await bench.look_up(keys(12))
    assert bench.store.writeback.pins <= 1
    await bench.until(lambda: not bench.store.writeback.open)
    assert sorted(bench.nvme.keys()) == keys(12)


async def test_a_block_comes_up_when_it_is_wanted(bench: Bench) -> None:
    await bench.push_below(keys(6))
    assert bench.host.keys() == []
    assert await bench.look_up(keys(8)) == 6
    assert bench.outcome("ok") == 6
    assert sorted(bench.host.keys()) == keys(6)


async def test_part_above_part_below_is_one_prefix(bench: Bench) -> None:
    await bench.push_below(keys(6))
    bench.offer(keys(2))
    bench.offer(keys(1, first=4))
    assert await bench.look_up(keys(6)) == 6
    assert bench.outcome("ok") == 3


async def test_many_who_want_the_same_load_it_once(bench: Bench) -> None:
    await bench.push_below(keys(6))
    calls = bench.disk.calls
    assert await asyncio.gather(*(bench.look_up(keys(6)) for _ in range(10))) == [6] * 10
    assert bench.disk.calls - calls == 6


async def test_a_prefetch_brings_up_and_pins_nothing(bench: Bench) -> None:
    await bench.push_below(keys(6))
    assert bench.store.bring(keys(6), "fp", None) == 6
    await bench.until(lambda: not bench.store.promotions.open)
    assert sorted(bench.host.keys()) == keys(6)
    assert bench.host.stats().pinned == 0
    assert bench.store.bring(keys(4, first=50), "fp", None) == 0
    assert bench.store.bring(keys(6), "other", None) == 0 or bench.host.shape is not None


async def test_demoted_when_wanted_twice_and_not_below_yet(bench: Bench) -> None:
    bench.disk.fail = True
    for start in range(0, HOST_SLOTS, 4):
        bench.offer(keys(4, first=start))
        await bench.look_up(keys(4, first=start))
        await bench.until(lambda: not bench.store.writeback.open)
    bench.disk.fail = False
    await bench.until(lambda: bench.nvme._io.breaker.allow(time.monotonic()))
    bench.nvme._io.breaker.abandon()
    bench.offer(keys(2, first=100))
    await bench.until(lambda: not bench.store.writeback.open)
    demoted = bench.nvme.keys()
    assert len(demoted) == HOST_SLOTS // 8, "as many as may wait"
    assert not any(bench.host.holds(key) for key in demoted)
    assert bench.store.evicted["demoted"] == len(demoted)
    assert await bench.look_up(demoted[:1]) == 1


class DemotionMachine(RuleBasedStateMachine):
    """Blocks come, are wanted, leave and are cleared above a disk whose speed the machine decides: no pin outlives the
    write-behind's line."""

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.bench = self.loop.run_until_complete(self._started())
        self.bench.disk.go.clear()

    async def _started(self) -> Bench:
        return await Bench(Path(self.folder.name)).start()

    def _turn(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0.001))

    @rule(first=st.integers(0, 3), count=st.integers(1, 3))
    def offer(self, first: int, count: int) -> None:
        self.bench.offer(keys(count, first=first))
        self._turn()

    @rule(first=st.integers(0, 3), count=st.integers(1, 3))
    def want(self, first: int, count: int) -> None:
        hold = Hold(self.bench.host)
        self.bench.store.pin(hold, keys(count, first=first), "fp")
        hold.close()
        self._turn()

    @rule(tenant=st.sampled_from(["", "nobody"]))
    def clear(self, tenant: str) -> None:
        async def cleared() -> None:
            self.bench.store.clear(tenant=tenant)

        self.loop.run_until_complete(cleared())

    @rule(number=st.integers(0, 3))
    def drop(self, number: int) -> None:
        self.bench.host.drop(keys(1, first=number))

    @rule(number=st.integers(0, 3))
    def come_and_leave(self, number: int) -> None:
        for _ in range(2):
            self.offer(number, 1)
            self.want(number, 1)
        self.evict(number)

    @rule(number=st.integers(0, 3))
    def evict(self, number: int) -> None:
        """What the host asks of a block that nobody holds before it leaves."""
        (key,) = keys(1, first=number)
        entry = self.bench.host.entry(key)
        if entry is not None and not entry.pins and not self.bench.host.keep(key):
            self.bench.host.drop([key])

    @rule(slow=st.booleans())
    def disk(self, slow: bool) -> None:
        (self.bench.disk.go.clear if slow else self.bench.disk.go.set)()
        self._turn()

    @invariant()
    def pins_are_the_lines(self) -> None:
        if hasattr(self, "bench"):
            held = sum(entry.pins for entry in (*self.bench.host._entries.values(), *self.bench.host._condemned))
            assert held == self.bench.store.writeback.pins

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            try:
                self.loop.run_until_complete(self.bench.end())
            finally:
                self.loop.close()
                self.folder.cleanup()


DemotionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestDemotion = DemotionMachine.TestCase


async def test_a_block_that_comes_and_leaves_again_before_it_is_written_is_let_go(bench: Bench) -> None:
    """Evicted, cleared, stored anew and evicted again, all while the disk stands still."""
    bench.disk.go.clear()
    bench.offer(keys(2))
    await bench.look_up(keys(2))
    writeback = bench.store.writeback
    await bench.until(lambda: writeback.pins == 1)
    last = next(key for key in keys(2) if (entry := bench.host.entry(key)) and not entry.pins)
    assert bench.host.keep(last), "what an eviction asks before a block leaves"
    bench.store.clear()
    bench.offer([last])
    assert bench.host.keep(last)
    assert bench.host.stats().pinned == writeback.pins == 2
    bench.disk.go.set()
    await bench.until(lambda: not writeback.open)
    assert bench.host.stats().pinned == 0


async def test_a_look_up_that_leaves_in_the_middle_leaves_nothing(bench: Bench) -> None:
    await bench.push_below(keys(6))
    for steps in range(0, 20, 2):
        task = asyncio.create_task(bench.look_up(keys(6)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bench.until(lambda: not bench.store.promotions.open)
        assert bench.host.stats().pinned == bench.store.writeback.pins
        bench.host.drop(keys(6))
    assert await bench.look_up(keys(6)) == 6


async def test_a_dead_disk_is_a_miss(bench: Bench) -> None:
    await bench.push_below(keys(6))
    bench.offer(keys(1))
    bench.disk.fail = True
    assert await bench.look_up(keys(6)) == 1
    assert bench.outcome("not_loaded") > 0
    bench.disk.fail = False
    await asyncio.sleep(0.1)
    await bench.until(lambda: not bench.store.promotions.open)
    async with asyncio.timeout(HANG_S):
        while await bench.look_up(keys(6)) != 6:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_stalled_disk_is_a_miss_for_one_and_nothing_for_others(bench: Bench) -> None:
    await bench.push_below(keys(4))
    bench.disk.go.clear()
    waiting = asyncio.create_task(bench.look_up(keys(4)))
    await asyncio.sleep(0.01)
    assert bench.offer(keys(4, first=20)) == 4
    assert await bench.look_up(keys(4, first=20)) == 4
    async with asyncio.timeout(HANG_S):
        assert await waiting == 0
    bench.disk.go.set()


async def test_a_flipped_bit_below_is_a_miss_and_told(bench: Bench) -> None:
    await bench.push_below(keys(3))
    slot = bench.nvme._table.index[keys(3)[1]].slot
    bench.disk.flip(ALIGN + slot * (ALIGN + BLOCK) + ALIGN + 77)
    assert await bench.look_up(keys(3)) == 1
    assert bench.store.evicted["corrupt"] == 1
    assert not bench.nvme.holds(keys(3)[1])


async def test_a_flipped_bit_above_is_not_written_below(bench: Bench) -> None:
    bench.offer(keys(1))
    entry = bench.host.entry(keys(1)[0])
    assert entry is not None
    bench.host.view(entry.slot)[5] ^= 1
    bench.store.pin(hold := Hold(bench.host), keys(1), "fp")
    hold.close()
    await bench.until(lambda: not bench.store.writeback.open)
    assert bench.nvme.keys() == []
    assert bench.store.evicted["corrupt"] == 1


async def test_a_working_set_far_over_everything(bench: Bench) -> None:
    """Hits are right, misses are misses, and nothing is lost."""
    rng = random.Random(5)
    hits = 0
    for _ in range(150):
        names = keys(6, first=6 * rng.randrange(30))
        hits += await bench.look_up(names)
        bench.offer(names)
    assert hits
    assert bench.store.evicted["capacity"]


async def test_everything_pinned_leaves_no_room_to_come_up(bench: Bench) -> None:
    await bench.push_below(keys(2))
    bench.offer(keys(HOST_SLOTS, first=100))
    hold = Hold(bench.host)
    assert len(bench.store.pin(hold, keys(HOST_SLOTS, first=100), "fp")) == HOST_SLOTS
    assert await bench.look_up(keys(2)) == 0
    assert bench.outcome("no_room") == 2
    hold.close()


async def test_time_to_live_in_every_tier(tmp_path: Path) -> None:
    bench = await Bench(tmp_path, ttl_s=1000.0).start()
    bench.offer(keys(2), ttl_s=0.05)
    bench.offer(keys(2, first=10))
    await bench.look_up(keys(2))
    await bench.until(lambda: not bench.store.writeback.open)
    await asyncio.sleep(0.06)
    assert await bench.look_up(keys(2)) == 0
    assert bench.store.expire() == 2
    assert bench.host.keys() == sorted(keys(2, first=10), reverse=True)
    assert not set(bench.nvme.keys()) & set(keys(2))
    assert bench.store.evicted["expired"] == 2
    listed = {one.key: one for one in bench.store.listed("")}
    assert 0 < listed[keys(1, first=10)[0]].ttl_s <= 1000
    await bench.end()


async def test_clear_by_tenant_and_of_everything_in_every_tier(bench: Bench) -> None:
    for tenant, first in (("a", 0), ("b", 10)):
        bench.offer(keys(2, first=first), tenant)
        await bench.look_up(keys(2, first=first))
        await bench.until(lambda: not bench.store.writeback.open)
    assert bench.store.clear(fingerprint="other") == 0
    assert bench.store.clear(tenant="a") == 2
    assert {one.tenant for one in bench.store.listed("")} == {"b"}
    assert [one.tiers for one in bench.store.listed("b")] == [("host", "nvme")] * 2
    assert list(bench.store.listed("a")) == []
    assert bench.store.clear() == 2
    assert bench.store.shape is None
    bench.store.fix(BlockShape("other", 2 * BLOCK, 32))


async def test_a_clear_while_blocks_come_up(bench: Bench) -> None:
    await bench.push_below(keys(4))
    bench.disk.go.clear()
    task = asyncio.create_task(bench.look_up(keys(4)))
    await asyncio.sleep(0.02)
    bench.store.clear()
    bench.disk.go.set()
    assert await task == 0
    assert bench.host.keys() == []
    await bench.until(lambda: not bench.store.promotions.open)  # a look-up does not wait for what follows a miss
    assert bench.outcome("cleared") == 4


async def test_a_clear_goes_on_without_its_caller(bench: Bench) -> None:
    bench.offer(keys(4), "a")
    await bench.look_up(keys(4))
    await bench.until(lambda: not bench.store.writeback.open)
    bench.disk.go.clear()
    assert bench.store.clear(tenant="a") == 4
    assert not await bench.store.forgotten(0.0), "the disk has not"
    caller = asyncio.create_task(bench.store.forgotten(HANG_S))
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    bench.disk.go.set()
    await bench.until(lambda: not bench.nvme.dirty)
    assert await bench.store.forgotten(HANG_S)


async def test_a_clear_is_finished_when_the_disk_is_back(bench: Bench) -> None:
    await bench.push_below(keys(4))
    bench.disk.fail = True
    bench.store.clear(tenant="other")
    bench.store.clear()
    assert not await bench.store.forgotten(0.05)
    bench.disk.fail = False
    assert await bench.store.forgotten(HANG_S)


@pytest.mark.parametrize("tenant", ["", "a"])
async def test_what_is_checked_to_be_written_when_it_is_cleared_is_not_written(
    bench: Bench, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, intact = threading.Event(), bench.host.intact
    monkeypatch.setattr(bench.host, "intact", lambda entry: checked.wait(HANG_S) and intact(entry))
    bench.offer(keys(4), "a")
    await bench.look_up(keys(4))
    await bench.until(lambda: bench.store.writeback.pins == 1)
    bench.store.clear(tenant=tenant)
    checked.set()
    await bench.until(lambda: not bench.store.writeback.open)
    assert await bench.store.forgotten(HANG_S)
    assert bench.nvme.keys() == []
    assert bench.host.keys() == []


async def test_verify_tells_what_cannot_be_read_from_what_is_bad(bench: Bench) -> None:
    await bench.push_below(keys(6))
    bench.offer(keys(1, first=50))
    bench.disk.fail = True
    last = [step async for step in bench.store.verify()][-1]
    assert last == Verified(checked=7, total=7, failed=0, unreadable=6)
    assert len(bench.nvme.keys()) == 6, "they may be good"
    outcomes = ("error", "open")
    counts = [bench.metrics._tier.labels("nvme", "load", outcome)._value.get() for outcome in outcomes]
    assert sum(counts) == 6
    bench.disk.fail = False


async def test_verify_finds_what_has_rotted(bench: Bench) -> None:
    await bench.push_below(keys(3))
    bench.offer(keys(3, first=10))
    entry = bench.host.entry(keys(1, first=11)[0])
    assert entry is not None
    bench.host.view(entry.slot)[9] ^= 1
    slot = bench.nvme._table.index[keys(1)[0]].slot
    bench.disk.flip(ALIGN + slot * (ALIGN + BLOCK) + ALIGN + 8)
    steps = [step async for step in bench.store.verify()]
    assert (steps[-1].checked, steps[-1].total, steps[-1].failed) == (6, 6, 2)
    assert [step async for step in bench.store.verify()][-1].failed == 0


async def test_events_follow_every_tier(bench: Bench) -> None:
    here: dict[str, set[bytes]] = {"host": set(), "nvme": set()}
    watch = bench.store.events.watch()

    async def follow() -> None:
        async for _, change in watch:
            if change.cleared:
                for held in here.values():
                    held.clear()
            here[change.tier] |= set(change.stored)
            here[change.tier] -= set(change.removed)

    task = asyncio.create_task(follow())
    rng = random.Random(3)
    for _ in range(40):
        names = keys(5, first=5 * rng.randrange(8))
        await bench.look_up(names)
        bench.offer(names)
    await bench.until(lambda: not bench.store.writeback.open and not bench.store.promotions.open)
    await bench.until(lambda: here == {"host": set(bench.host.keys()), "nvme": set(bench.nvme.keys())})
    assert here["nvme"]
    bench.store.clear()
    await bench.until(lambda: here == {"host": set(), "nvme": set()})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await watch.aclose()


async def test_speeds_are_told_when_they_change(bench: Bench) -> None:
    watch = bench.store.events.watch()
    await anext(watch)
    await anext(watch)
    bench.store.tell_speeds()
    assert await anext(watch) == (2, Change(speeds=True))
    await bench.push_below(keys(2))
    bench.store.tell_speeds()
    while not (await anext(watch))[1].speeds:
        pass
    assert bench.store.stats()[1].read_latency_s > 0
    await watch.aclose()


OTHER = BlockShape("other", 2 * BLOCK, 32)


async def test_what_another_life_left_is_served_and_gives_way_to_another_layout(tmp_path: Path) -> None:
    first = await Bench(tmp_path).start()
    await first.push_below(keys(6))
    await first.end()
    second = await Bench(tmp_path).start()
    assert second.store.shape == SHAPE
    assert await second.look_up(keys(6)) == 6
    await second.end()
    third = await Bench(tmp_path).start()
    with pytest.raises(BatonError) as refused:
        third.store.fix(OTHER)
    assert refused.value.reason is Reason.KV_LAYOUT_MISMATCH
    third.store.give_way(["other", SHAPE.fingerprint])
    assert len(third.nvme.keys()) == 6, "a worker has this layout"
    third.store.give_way(["other"])
    assert third.store.evicted["layout"] == 6
    third.store.fix(OTHER)
    facts = Facts()
    (slot,) = third.host.reserve(1)
    third.host.commit(slot, b"k" * 16, third.host.sum(slot, b"k" * 16), facts)
    third.store.stored([b"k" * 16], facts)
    third.store.stored([b"k" * 16], facts)
    await third.until(lambda: third.nvme.keys() == [b"k" * 16])
    await third.end()


async def test_a_disk_that_is_not_scanned_yet_has_its_layout(tmp_path: Path) -> None:
    first = await Bench(tmp_path).start()
    await first.push_below(keys(6))
    await first.end()
    second = Bench(tmp_path)
    await second.nvme.open()
    assert second.store.fingerprint == SHAPE.fingerprint
    with pytest.raises(BatonError):
        second.store.fix(OTHER)
    second.nvme.clear()
    assert second.store.fingerprint == "", "what the scan is yet to find was cleared"
    second.store.fix(OTHER)
    await second.nvme.flush()
    await second.end()
    third = Bench(tmp_path)
    await third.nvme.open()
    assert third.store.fingerprint == SHAPE.fingerprint
    await third.nvme.scan()
    assert third.store.fingerprint == "", "nothing is there"
    await third.end()


async def test_a_layout_that_nobody_uses_any_more_gives_way_in_every_tier(bench: Bench, tmp_path: Path) -> None:
    await bench.push_below(keys(6))
    bench.offer(keys(2, first=20))
    bench.store.give_way(["other"])
    assert len(bench.store.host.keys()) == 2, "nobody has come with another one"
    bench.store.asked("other")
    bench.store.give_way(["other", SHAPE.fingerprint])
    assert len(bench.store.host.keys()) == 2, "it is in use"
    bench.store.give_way(["other"])
    assert bench.store.evicted["layout"] == 8
    assert bench.store.fingerprint == ""
    bench.store.fix(OTHER)
    assert await bench.store.forgotten(HANG_S)
    await bench.end()
    assert (await Bench(tmp_path).start()).nvme.keys() == []


async def test_what_gives_way_takes_nothing_of_another_layout_with_it(bench: Bench) -> None:
    await bench.push_below(keys(6))
    bench.host.fix(OTHER)
    (slot,) = bench.host.reserve(1)
    bench.host.commit(slot, b"k" * 16, bench.host.sum(slot, b"k" * 16))
    async with aclosing(bench.store.events.watch()) as watch:
        await anext(watch)
        await anext(watch)
        bench.store.asked(SHAPE.fingerprint)
        bench.store.give_way([SHAPE.fingerprint])
        assert bench.host.keys() == []
        assert len(bench.nvme.keys()) == 6
        assert (await anext(watch))[1] == Change("host", removed=(b"k" * 16,))
    assert await bench.look_up(keys(6)) == 6
    assert not bench.nvme.dirty


async def test_a_layout_that_a_pin_keeps_gives_way_once(bench: Bench) -> None:
    bench.offer(keys(2))
    hold = Hold(bench.host)
    bench.store.pin(hold, keys(2), SHAPE.fingerprint)
    bench.store.asked("other")
    async with aclosing(bench.store.events.watch()) as watch:
        await anext(watch)
        await anext(watch)
        for _ in range(3):
            bench.store.give_way(["other"])
        assert (await anext(watch))[1].cleared
        bench.store.events.publish(Change(speeds=True))
        assert (await anext(watch))[1].speeds, "nothing came between"
    assert bench.store.fingerprint == SHAPE.fingerprint
    hold.close()
    assert bench.store.fingerprint == ""


async def test_what_is_lost_to_watchers_and_what_a_disk_has_not_forgotten_are_counted(bench: Bench) -> None:
    async with aclosing(bench.store.events.watch()) as changes:
        await anext(changes)
        for _ in range(1100):
            bench.store.events.publish(Change(speeds=True))
    assert "baton_kvstore_watch_overflows_total 1.0" in bench.exposed()
    await bench.push_below(keys(2))
    offers: Any = SimpleNamespace(idle=partial(asyncio.sleep, 0))
    nothing: Any = None
    service = KvStoreService(nothing, "", bench.store, nothing, offers, bench.background, bench.metrics)
    bench.disk.fail = True
    bench.store.clear()
    await service.drain(0.1)
    assert 'baton_kvstore_unforgotten_total{tier="nvme"} 1.0' in bench.exposed()
    assert 'baton_kvstore_tier_dirty{tier="nvme"} 1.0' in bench.exposed()
    bench.disk.fail = False
    assert await bench.store.forgotten(HANG_S)
    assert 'baton_kvstore_tier_dirty{tier="nvme"} 0.0' in bench.exposed()


async def test_eviction_between_the_look_up_and_the_load_is_a_miss(bench: Bench) -> None:
    await bench.push_below(keys(3))
    hold = Hold(bench.host)
    assert bench.store.bring(keys(3), "fp", hold) == 3
    bench.nvme.drop(keys(2))
    for key in keys(3):
        await bench.store.promotions.wait(key)
    assert hold.get(keys(1)[0]) is None
    hold.keep([])
    await bench.nvme.flush()


async def test_a_block_larger_than_the_disk_stays_above(bench: Bench) -> None:
    huge = BlockShape("huge", BLOCK * HOST_SLOTS // 2, 32)
    bench.disk.size = ALIGN + BLOCK
    bench.host.fix(huge)
    (slot,) = bench.host.reserve(1)
    bench.host.commit(slot, b"k" * 16, bench.host.sum(slot, b"k" * 16))
    for _ in range(2):
        bench.store.stored([b"k" * 16], Facts())
    await bench.until(lambda: not bench.store.writeback.open)
    assert bench.nvme.keys() == []
    assert bench.metrics._not_written.labels("too_large")._value.get() == 1


async def test_a_snapshot_is_cut_into_messages_of_bounded_size(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.store.SNAPSHOT_KEYS", 4)
    await bench.push_below(keys(6))
    bench.offer(keys(9))
    changes = bench.store._snapshot()
    assert [(c.tier, len(c.stored), c.cleared) for c in changes] == [
        ("host", 4, True),
        ("host", 4, False),
        ("host", 1, False),
        ("nvme", 4, False),
        ("nvme", 2, False),
    ]
