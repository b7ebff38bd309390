"""The disk tier against a disk that fails, stalls, tears and flips: a miss and a count, and never wrong bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import random
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.kvstore.aligned import ALIGN, aligned_buffer
from services.kvstore.breaker import Breaker
from services.kvstore.eviction import Watermarks
from services.kvstore.nvme.disk import SlabFile
from services.kvstore.nvme.slab import slot_bytes, slot_offset
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.tier import BlockShape, Facts
from tests.unit.kvstore.disks import BreakableDisk

BLOCK = 3 * ALIGN - 100
SLOTS = 16
SHAPE = BlockShape("fp", BLOCK, 32)
SIZE = ALIGN + SLOTS * slot_bytes(SHAPE)
HANG_S = 30.0


def keys(count: int, first: int = 0) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(first, first + count)]


def payload(key: bytes) -> memoryview:
    return memoryview(random.Random(key).randbytes(BLOCK))


class Life:
    """One life of a store's disk tier over a folder that outlives it."""

    def __init__(
        self, folder: Path, deadline_s: float = 20.0, breaker: Breaker | None = None, size: int = SIZE
    ) -> None:
        self.disk = BreakableDisk(folder, size)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.gone: list[tuple[bytes, str]] = []
        self.tier = NvmeTier(self.disk, Watermarks(1.0, 0.8), {}, deadline_s, breaker, self._count)
        self.tier.on_gone = lambda names, reason: self.gone.extend((key, reason) for key in names)

    def _count(self, operation: str, outcome: str, number: int) -> None:
        self.counts[operation, outcome] += number

    async def start(self) -> Life:
        await self.tier.open()
        await self.tier.scan()
        return self

    async def put(self, names: list[bytes], facts: Facts = Facts()) -> list[bool]:  # noqa: B008
        self.tier.fix(SHAPE)
        return [await self.tier.store(key, payload(key), facts) for key in names]

    async def get(self, key: bytes) -> bool:
        """Whether it was there; if so, it was the right bytes."""
        into = bytearray(BLOCK)
        found = await self.tier.load(key, memoryview(into))
        assert not found or bytes(into) == payload(key)
        return found

    def where(self, key: bytes) -> int:
        """Where its slot begins in the file."""
        return slot_offset(self.tier._table.index[key].slot, SHAPE)

    async def settled(self) -> None:
        async with asyncio.timeout(HANG_S):
            while self.tier.check_integrity():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        self.disk.go.set()
        await self.settled()
        await self.tier.close()


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    found = await Life(tmp_path, deadline_s=0.3, breaker=Breaker(threshold=3, pause_s=0.05)).start()
    yield found
    await found.end()


async def test_another_life_finds_every_block(tmp_path: Path) -> None:
    first = await Life(tmp_path).start()
    assert all(await first.put(keys(12), Facts("tenant", 0.0)))
    await first.end()
    second = Life(tmp_path)
    found: list[bytes] = []
    second.tier.on_found = found.extend
    await second.start()
    assert sorted(found) == keys(12)
    assert second.tier.shape == SHAPE
    assert second.counts["scan", "blocks"] == 12
    assert all([await second.get(key) for key in keys(12)])
    placed = second.tier.placed(keys(1)[0])
    assert placed is not None
    assert placed.facts.tenant == "tenant"
    assert all(await second.put(keys(6, first=50))), "free slots are known again, and taken ones are evicted"
    await second.end()


async def test_flipped_bits_anywhere_are_a_miss(life: Life) -> None:
    await life.put(keys(8))
    for number in range(8):
        begin = life.where(keys(8)[number])
        life.disk.flip(begin + random.Random(number).randrange(0, 40) + (ALIGN if number % 2 else 0))
    assert not any([await life.get(key) for key in keys(8)])
    assert life.counts["load", "corrupt"] == 8
    assert {reason for _, reason in life.gone} == {"corrupt"}
    assert all(await life.put(keys(8)))
    assert all([await life.get(key) for key in keys(8)])


async def test_truncated_behind_our_back_is_a_miss(life: Life) -> None:
    await life.put(keys(8))
    in_order = sorted(keys(8), key=life.where)
    os.truncate(life.disk.path, life.where(in_order[6]) + ALIGN + 10)
    assert [await life.get(key) for key in in_order] == [True] * 6 + [False] * 2
    assert life.counts["load", "error"] + life.counts["load", "corrupt"] == 2


async def test_eio_is_a_miss_and_opens_the_circuit_until_the_disk_is_back(life: Life) -> None:
    await life.put(keys(4))
    life.disk.fail = True
    assert not any([await life.get(key) for key in keys(4)])
    assert life.counts["load", "error"] == 3
    assert life.counts["load", "open"] == 1, "nobody asks any more"
    calls = life.disk.calls
    assert await life.put(keys(1, first=9)) == [False]
    assert life.disk.calls == calls
    assert life.tier.stats().state.startswith("open")
    life.disk.fail = False
    async with asyncio.timeout(HANG_S):
        while not await life.get(keys(1)[0]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert life.tier.stats().state.startswith("ok")
    assert all([await life.get(key) for key in keys(4)])


async def test_a_stall_is_a_miss_at_its_deadline_and_late_answers_land_nowhere(life: Life) -> None:
    await life.put(keys(4))
    life.disk.go.clear()
    into = bytearray(b"\xee" * BLOCK)
    async with asyncio.timeout(HANG_S):
        assert not await life.tier.load(keys(1)[0], memoryview(into))
        assert not await life.tier.store(keys(1, first=7)[0], payload(b"x"), Facts())
    assert life.counts["load", "late"] == 1
    assert any("have not returned" in finding for finding in life.tier.check_integrity())
    life.disk.go.set()
    await life.settled()
    assert bytes(into) == b"\xee" * BLOCK
    assert not life.tier.holds(keys(1, first=7)[0])
    assert all([await life.get(key) for key in keys(4)])


async def test_every_thread_stuck_ends_at_the_deadline_and_then_at_once(life: Life) -> None:
    await life.put(keys(8))
    life.disk.go.clear()
    async with asyncio.timeout(HANG_S):
        assert not any(await asyncio.gather(*(life.get(key) for key in keys(8))))
        assert life.tier.stats().state.startswith("open")
        assert not await life.get(keys(1)[0])
    life.disk.go.set()
    await life.settled()


async def test_a_slot_with_a_late_write_is_nobody_elses(life: Life) -> None:
    await life.put(keys(SLOTS - 1))
    life.disk.go.clear()
    assert not await life.tier.store(keys(1, first=90)[0], payload(b"y"), Facts())
    busy = life.tier._table.busy
    assert busy == 1
    life.disk.go.set()
    await life.settled()


async def test_cancelled_at_any_moment_nothing_is_lost(life: Life) -> None:
    await life.put(keys(6))
    for number in range(30):
        task = asyncio.create_task(
            life.get(keys(6)[number % 6]) if number % 2 else life.put(keys(1, first=20 + number))
        )
        for _ in range(number % 5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await life.settled()
    assert all([await life.get(key) for key in list(life.tier.keys())])


async def test_torn_writes_are_dropped_by_the_scan(tmp_path: Path) -> None:
    first = await Life(tmp_path).start()
    await first.put(keys(6))
    for length in (ALIGN, 2 * ALIGN, slot_bytes(SHAPE)):
        first.disk.tear_after = length
        assert await first.put(keys(1, first=100 + length)) == [False]
        first.disk.tear_after = None
        await first.put(keys(1, first=length))
    await first.end()
    second = await Life(tmp_path).start()
    left = set(second.tier.keys())
    assert set(keys(6)) <= left
    assert not left & {keys(1, first=100 + length)[0] for length in (ALIGN, 2 * ALIGN, slot_bytes(SHAPE))}
    assert all([await second.get(key) for key in left])
    await second.end()


async def test_a_header_that_says_filling_is_torn(tmp_path: Path) -> None:
    first = await Life(tmp_path).start()
    await first.put(keys(3))
    first.disk.tear_after = slot_bytes(SHAPE)  # all of it, but never sealed
    await first.put(keys(1, first=9))
    await first.end()
    second = await Life(tmp_path).start()
    assert second.counts["scan", "torn"] == 1
    assert second.counts["scan", "blocks"] == 3
    await second.end()


@pytest.mark.parametrize("what", ["all", "some"])
async def test_what_was_cleared_stays_cleared(tmp_path: Path, what: str) -> None:
    first = await Life(tmp_path).start()
    await first.put(keys(6))
    gone = first.tier.clear() if what == "all" else first.tier.drop(keys(2))
    await first.tier.flush()
    await first.end()
    second = await Life(tmp_path).start()
    assert set(second.tier.keys()) == set(keys(6)) - set(gone)
    await second.end()


async def forgotten(life: Life) -> None:
    """Flush until nothing that was cleared could come back."""
    async with asyncio.timeout(HANG_S):
        while life.tier.dirty:
            with contextlib.suppress(OSError):
                await life.tier.flush()
            await asyncio.sleep(0.005)


async def test_evicted_blocks_of_a_cleared_tenant_do_not_come_back(tmp_path: Path) -> None:
    first = await Life(tmp_path).start()
    await first.put(keys(SLOTS), Facts("a"))
    await first.put(keys(1, first=50), Facts("b"))
    assert len(first.gone) > 1, "evicted, and not all of them overwritten"
    first.tier.clear("a")
    await first.tier.flush()
    assert first.tier.keys() == keys(1, first=50)
    await first.end()
    second = await Life(tmp_path).start()
    assert second.tier.keys() == keys(1, first=50)
    assert all(await second.put(keys(SLOTS - 2, first=100))), "their slots are free"
    await second.end()


@pytest.mark.parametrize("late", [False, True])
async def test_a_write_under_way_of_a_cleared_tenant_does_not_come_back(tmp_path: Path, late: bool) -> None:
    first = await Life(tmp_path, deadline_s=0.2 if late else 20.0).start()
    await first.put(keys(1), Facts("b"))
    first.disk.go.clear()
    calls = first.disk.calls
    writing = asyncio.create_task(first.put(keys(1, first=9), Facts("a")))
    async with asyncio.timeout(HANG_S):
        while first.disk.calls == calls:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        if late:
            await writing
    first.tier.clear("a")
    assert first.tier.dirty
    first.disk.go.set()
    assert await writing == [False]
    await forgotten(first)
    assert first.tier.keys() == keys(1)
    await first.end()
    second = await Life(tmp_path).start()
    assert second.tier.keys() == keys(1)
    await second.end()


@pytest.mark.parametrize("readable", [True, False])
async def test_a_tenant_that_is_cleared_before_the_scan_has_come_to_it(
    tmp_path: Path, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.kvstore.nvme.scan.RETRY_S", 0.0)
    first = await Life(tmp_path).start()
    await first.put(keys(3), Facts("a"))
    await first.put(keys(3, first=10), Facts("b"))
    await first.end()
    second = Life(tmp_path, breaker=Breaker(threshold=1000))
    await second.tier.open()
    if readable:
        second.tier.clear("a")
        assert second.tier.dirty
    second.disk.fail = not readable
    await second.tier.scan()
    second.disk.fail = False
    if not readable:
        second.tier.clear("a")
    await forgotten(second)
    left = keys(3, first=10) if readable else []
    assert sorted(second.tier.keys()) == left
    await second.end()
    third = await Life(tmp_path).start()
    assert sorted(third.tier.keys()) == left
    await third.end()


async def test_a_disk_that_cannot_forget_says_so_and_is_told_again(tmp_path: Path) -> None:
    first = await Life(tmp_path, breaker=Breaker(threshold=3, pause_s=0.02)).start()
    await first.put(keys(3), Facts("a"))
    first.disk.fail = True
    first.tier.clear("a")
    with pytest.raises(OSError, match="disk tier"):
        await first.tier.flush()
    assert first.tier.dirty
    first.disk.fail = False
    await forgotten(first)
    assert all(await first.put(keys(SLOTS, first=20), Facts("b")))
    await first.end()
    second = await Life(tmp_path).start()
    assert set(second.tier.keys()) == set(keys(SLOTS, first=20))
    await second.end()


async def test_many_headers_are_overwritten_in_few_operations(life: Life) -> None:
    await life.put(keys(12), Facts("a"))
    life.tier.clear("a")
    operations, run = [], life.tier._io.run

    async def counted(size: int, *args: Any, **hooks: Any) -> object:
        operations.append(size)
        return await run(size, *args, **hooks)

    life.tier._io.run = counted  # type: ignore[method-assign, assignment]
    calls = life.disk.calls
    await life.tier.flush()
    assert (len(operations), life.disk.calls - calls) == (1, 12)


async def test_a_late_write_of_the_superblock_does_not_undo_a_clear(life: Life) -> None:
    life.disk.go.clear()
    assert await life.put(keys(1)) == [False]
    late, life.disk.go = life.disk.go, threading.Event()
    life.disk.go.set()
    life.tier.clear()
    await life.tier.flush()
    assert life.tier.dirty, "the late one may land over it"
    late.set()
    await life.settled()
    assert life.tier.dirty, "it has"
    await forgotten(life)
    assert life.tier._saved == life.tier._superblock


async def test_another_layout_starts_over(tmp_path: Path) -> None:
    first = await Life(tmp_path).start()
    await first.put(keys(6))
    other = BlockShape("other", 2 * BLOCK, 32)
    first.tier.fix(other)
    assert {reason for _, reason in first.gone} == {"layout"}
    assert await first.tier.store(b"k" * 16, memoryview(bytes(2 * BLOCK)), Facts())
    await first.end()
    second = await Life(tmp_path).start()
    assert second.tier.shape == other
    assert second.tier.keys() == [b"k" * 16]
    await second.end()


@pytest.mark.parametrize("length", [3, SIZE // 2, 2 * SIZE])
def test_a_file_that_is_no_stores_is_left_as_it_is(tmp_path: Path, length: int) -> None:
    theirs = random.Random(1).randbytes(length)
    (tmp_path / "slab").write_bytes(theirs)
    with pytest.raises(OSError, match="is no store's") as refused:
        SlabFile(tmp_path, SIZE)
    assert refused.value.errno == errno.EEXIST
    assert (tmp_path / "slab").read_bytes() == theirs


async def test_a_slab_that_was_never_written_to_is_ours(tmp_path: Path) -> None:
    SlabFile(tmp_path, SIZE).close()
    life = await Life(tmp_path).start()
    assert life.counts["open", "empty"] == 1
    assert all(await life.put(keys(4)))
    await life.end()


@pytest.mark.parametrize(("where", "outcome"), [(8, "version"), (20, "torn")])
async def test_a_slab_of_another_version_or_with_a_torn_superblock_starts_anew(
    tmp_path: Path, where: int, outcome: str
) -> None:
    first = await Life(tmp_path).start()
    await first.put(keys(4))
    await first.end()
    first.disk.flip(where)
    second = await Life(tmp_path).start()
    assert second.counts["open", outcome] == 1
    assert second.tier.shape is None
    assert not any([await second.get(key) for key in keys(4)])
    assert all(await second.put(keys(2, first=20)))
    await second.end()
    third = await Life(tmp_path).start()
    assert sorted(third.tier.keys()) == keys(2, first=20)
    assert third.counts["open", outcome] == 0
    await third.end()


@pytest.mark.parametrize("slots", [SLOTS - 6, SLOTS + 6])
async def test_a_slab_of_another_size_keeps_what_lies_within_it(tmp_path: Path, slots: int) -> None:
    first = await Life(tmp_path).start()
    await first.put(keys(SLOTS))
    within = {key for key in keys(SLOTS) if first.tier._table.index[key].slot < slots}
    await first.end()
    second = await Life(tmp_path, size=ALIGN + slots * slot_bytes(SHAPE)).start()
    assert set(second.tier.keys()) == within
    assert all([await second.get(key) for key in within])
    assert second.counts["open", "cut_off"] == max(0, SLOTS - slots)
    assert all(await second.put(keys(slots, first=50)))
    assert all([await second.get(key) for key in list(second.tier.keys())])
    await second.end()


async def test_a_slab_without_room_for_one_of_its_blocks_starts_anew(tmp_path: Path) -> None:
    first = await Life(tmp_path).start()
    await first.put(keys(2))
    await first.end()
    second = await Life(tmp_path, size=2 * ALIGN).start()
    assert second.counts["open", "too_small"] == 1
    assert second.tier.shape is None
    await second.end()


async def test_a_slab_that_cannot_be_read_at_start_is_an_empty_one(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.disk.fail = True
    await life.start()
    life.disk.fail = False
    assert life.tier.shape is None
    assert all(await life.put(keys(2)))
    await life.end()


def test_a_folder_belongs_to_one_store(tmp_path: Path) -> None:
    disk = SlabFile(tmp_path, SIZE)
    with pytest.raises(OSError, match="another store") as refused:
        SlabFile(tmp_path, SIZE)
    assert refused.value.errno == errno.EBUSY
    disk.close()
    SlabFile(tmp_path, SIZE).close()


def cached_pages(path: Path) -> int:
    """How many of a file's pages are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        states = (ctypes.c_ubyte * (len(pages) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(pages)
        try:
            if libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(pages)), states):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del first
    return sum(state & 1 for state in states)


def test_without_direct_io_what_was_written_leaves_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run(["stat", "-fc", "%T", str(tmp_path)], capture_output=True, text=True).stdout.strip() == "tmpfs":
        pytest.skip("the page cache is all there is of a tmpfs")
    monkeypatch.setattr(SlabFile, "_try_direct", lambda disk, path, flags: False)
    disk = SlabFile(tmp_path, 64 * ALIGN)
    data = aligned_buffer(32 * ALIGN)
    data[:] = b"x" * len(data)
    disk.write(ALIGN, data)
    assert cached_pages(tmp_path / "slab") == 0
    disk.close()


def test_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file system of 1 MiB, where the machine lets us mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(OSError, match="No space") as refused:
            SlabFile(place / "kv", 4 << 20)
        assert refused.value.errno == errno.ENOSPC
        assert (place / "kv" / "slab").stat().st_size == 0
        SlabFile(place / "kv", 512 << 10).close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_breaker() -> None:
    breaker = Breaker(threshold=2, pause_s=1.0, max_pause_s=3.0)
    for now in (0.0, 0.1):
        assert breaker.allow(now)
        breaker.failure(now)
    assert not breaker.allow(0.5)
    assert breaker.allow(1.2)
    assert not breaker.allow(1.2), "one probe at a time"
    breaker.failure(1.2)
    assert not breaker.allow(3.1)
    assert breaker.allow(3.3)
    breaker.abandon()
    assert breaker.allow(3.3), "a probe that was not made is made by the next one"
    breaker.failure(3.3)
    assert not breaker.allow(6.2), "the pause has a bound"
    assert breaker.allow(6.4)
    breaker.success()
    assert breaker.state(6.4) == "ok"
    assert breaker.allow(6.4)
