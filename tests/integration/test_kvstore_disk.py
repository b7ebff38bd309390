"""The disk tier of a real store process: killed in mid-write, flipped, truncated, full at start and later, frozen.
Always a miss and a counter, never an error to the client, never wrong bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from baton.registry import Registration, Registry
from baton.v1 import kvstore_pb2, registry_pb2, worker_pb2
from tests.etcd import EtcdServer
from tests.integration.test_kvstore import (
    BLOCK,
    FINGERPRINT,
    HANG_S,
    SLOTS,
    Client,
    keys,
    scrape,
    start_peer,
    start_store,
)
from tests.kv_peer import KvPeer
from tests.worker_process import ROOT, WorkerProcess

pytestmark = pytest.mark.integration

HEADER = 4096
DISK_SLOTS = 64
NVME_GIB = (HEADER + DISK_SLOTS * (HEADER + BLOCK)) / 2**30
BLOCKS = 40
STALL_S = 5.0


@pytest.fixture(scope="module")
def etcd_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server.address


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[KvPeer]:
    """Who offers and who reads: sealed blocks `keys(BLOCKS)`, and as much room to read into."""
    started: list[KvPeer] = []
    yield start_peer(started, tmp_path, "peer", "tcp", blocks=BLOCKS)
    for one in started:
        one.stop()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts file systems for a test; skips it where that is not allowed."""
    places: list[Path] = []

    def mount(name: str, *arguments: str) -> Path:
        place = tmp_path / name
        place.mkdir()
        if subprocess.run(["mount", *arguments, str(place)], capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=False)


@contextlib.asynccontextmanager
async def running(process: WorkerProcess) -> AsyncIterator[Client]:
    """A client of a store that is ending its start."""
    with process:
        client = Client(process.address)
        try:
            yield client
        finally:
            await client.channel.close()


async def nvme(client: Client) -> kvstore_pb2.Tier:
    """The disk tier's figures."""
    (tier,) = [tier for tier in (await client.stats()).tiers if tier.name == "nvme"]
    return tier


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for an async condition; only a hang fails."""
    end = time.monotonic() + HANG_S
    while not await condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.05)


async def read_all(client: Client, peer: KvPeer, names: list[bytes], deadline_s: float = 20.0) -> int:
    """Look up with patience for the slower tiers, read everything that is offered: how many blocks, all right."""
    request = kvstore_pb2.LookupRequest(keys=names, fingerprint=FINGERPRINT, deadline_s=deadline_s)
    call = client.stub.Lookup(request, timeout=HANG_S)
    handles = []
    try:
        first = reply = await call.read()
        handles.extend(reply.handles)
        while not reply.complete:
            reply = await call.read()
            handles.extend(reply.handles)
        assert [handle.key for handle in handles] == names[: len(handles)]
        if handles:
            assert await peer.read(first.peer, handles) == ["ok"] * len(handles)
        return len(handles)
    finally:
        call.cancel()


async def fill_disk(client: Client, peer: KvPeer, names: list[bytes]) -> None:
    """Offer, and want again: so every block is written below, and the first ones leave the host."""
    handles = dict(zip(names, peer.seal(names, FINGERPRINT), strict=True))
    for start in range(0, len(names), 2):
        part = names[start : start + 2]
        assert (await client.offer(peer.peer, [handles[key] for key in part])).stored == len(part)
        async with client.lookup(part) as found:
            assert len(found.handles) == len(part)

        async def written(wanted: int = start + len(part)) -> bool:
            return (await nvme(client)).blocks == wanted

        await until(written, "write-behind did not write")


async def on_disk(client: Client, *, alone: bool = False) -> list[bytes]:
    """Keys of the blocks that lie on the disk, or on the disk alone."""
    pages = client.stub.List(kvstore_pb2.ListRequest(), timeout=HANG_S)
    listed = [block async for page in pages for block in page.blocks if "nvme" in block.tiers]
    return [block.key for block in listed if not alone or len(block.tiers) == 1]


async def all_right_from_disk(client: Client, peer: KvPeer) -> None:
    """More is written than the host holds; then what lies on the disk alone comes up and is right."""
    for first in range(3000, 3000 + 2 * SLOTS, 4):
        names = keys(4, first=first)
        await client.offer(peer.peer, peer.seal(names, FINGERPRINT))
        await read_all(client, peer, names)  # wants them written
        await client.settle()
    alone = await on_disk(client, alone=True)
    assert alone
    assert [await read_all(client, peer, [name]) for name in alone] == [1] * len(alone)


async def verify(client: Client) -> int:
    """Have every block of every tier read and checked; how many failed and are gone."""
    *_, last = [reply async for reply in client.stub.Verify(kvstore_pb2.VerifyRequest(), timeout=HANG_S)]
    assert last.checked == last.total
    return int(last.failed)


async def counted(process: WorkerProcess, operation: str, outcome: str) -> float:
    """So many blocks on the disk ended so."""
    text = await asyncio.to_thread(scrape, process.metrics)
    labels = f'{{operation="{operation}",outcome="{outcome}",tier="nvme"}}'
    found = re.search(rf"^baton_kvstore_tier_operations_total{re.escape(labels)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def command(*arguments: str) -> bool:
    """Run a command of the system's; whether it went well."""
    return subprocess.run(arguments, capture_output=True, timeout=HANG_S).returncode == 0


def slab_offset(slot: int) -> int:
    """Where a slot's payload lies."""
    return HEADER + slot * (HEADER + BLOCK) + HEADER


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`baton ...` as a person would."""
    command = [sys.executable, "-m", "baton.cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)


async def test_killed_restarted_flipped_truncated(tmp_path: Path, etcd_address: str, peer: KvPeer) -> None:
    flags = {"nvme_dir": tmp_path / "nvme", "nvme_gib": NVME_GIB}
    slab = tmp_path / "nvme" / "slab"
    clean = keys(BLOCKS - 4)
    first = start_store(tmp_path, etcd_address, "first", **flags)
    async with running(first) as client:
        await fill_disk(client, peer, clean)
        assert (await client.stats()).tiers[0].blocks < len(clean), "the host is smaller than what was offered"
        assert await read_all(client, peer, clean[:8]) == 8
        tier = await nvme(client)
        assert tier.read_latency_s > 0
        assert tier.read_bytes_s > 0
        await client.settle()
        # killed while it writes: the last blocks are on their way down
        handles = peer.seal(keys(BLOCKS), FINGERPRINT)[-4:]
        await client.offer(peer.peer, handles)
        async with client.lookup(keys(4, first=BLOCKS - 4)):
            pass
        first.kill()
    with start_store(tmp_path, etcd_address, "second", **flags) as second:
        client = Client(second.address)

        async def scanned() -> bool:
            return (await nvme(client)).state.startswith("ok")

        await until(scanned, "the scan does not end")
        found = (await nvme(client)).blocks
        assert found >= 0.95 * len(clean)
        print(f"found {found} of {len(clean)} clean slots and up to 4 that were being written")
        call = client.stub.Watch(worker_pb2.WatchRequest(), timeout=HANG_S)
        snapshot: dict[str, set[bytes]] = {}
        while len(snapshot) < 2:
            update = await call.read()
            if update.HasField("cache"):
                snapshot[update.cache.tier] = set(update.cache.stored)
        call.cancel()
        assert snapshot["host"] == set()
        assert set(clean) <= snapshot["nvme"]
        assert await read_all(client, peer, clean[:8]) == 8
        prefetch = kvstore_pb2.PrefetchRequest(keys=clean[6:12], fingerprint=FINGERPRINT)
        reply = await client.stub.Prefetch(prefetch, timeout=HANG_S)
        assert (reply.readable, reply.coming) == (2, 4)
        await client.settle()
        async with client.lookup(clean[8:12]) as above:
            assert len(above.handles) == 4, "without a deadline only what was prefetched"
        # every payload on the disk gets a flipped bit: what the host holds is right, all else is a miss
        rng = random.Random(7)
        with slab.open("r+b", buffering=0) as file:
            for slot in range(DISK_SLOTS):
                at = slab_offset(slot) + rng.randrange(BLOCK)
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 16]), at)
        assert await read_all(client, peer, clean[20:30]) == 0
        assert (await client.stats()).evicted["corrupt"] >= 1
        shown = run_cli("kv", "stats", "--store", second.address, "--json")
        assert {tier["name"] for tier in json.loads(shown.stdout)["tiers"]} == {"host", "nvme"}
        listed = json.loads(run_cli("kv", "ls", "--store", second.address, "--json").stdout)
        assert {tuple(block["tiers"]) for block in listed} == {("host", "nvme"), ("nvme",)}
        checked = run_cli("kv", "verify", "--store", second.address, "--json")
        assert checked.returncode == 1, "something had rotted"
        assert json.loads(checked.stdout)["failed"] > 0
        assert json.loads(checked.stdout)["unreadable"] == 0
        assert json.loads(run_cli("kv", "verify", "--store", second.address, "--json").stdout)["failed"] == 0
        text = await asyncio.to_thread(scrape, second.metrics)
        assert 'baton_kvstore_tier_operations_total{operation="load",outcome="corrupt",tier="nvme"}' in text
        # written anew, then cut off: reading behind the end is a miss, too
        await client.clear()
        names = keys(8)
        await fill_disk(client, peer, names)
        for start in range(8, 8 + SLOTS + 8, 4):
            handles = peer.seal(keys(start + 4), FINGERPRINT)[start:]
            await client.offer(peer.peer, handles)
        os.truncate(slab, HEADER)
        unread = await asyncio.to_thread(run_cli, "kv", "verify", "--store", second.address)
        assert unread.returncode == 1
        assert "could not be read" in unread.stdout
        assert "verify again" in unread.stdout
        assert await read_all(client, peer, names) < 8
        reply_after = await client.offer(peer.peer, peer.seal(names, FINGERPRINT))
        assert reply_after.stored + reply_after.known == 8
        assert await read_all(client, peer, names) == 8
        cleared = run_cli("kv", "clear", "--store", second.address)
        assert "blocks forgotten" in cleared.stdout
        await client.channel.close()


async def registered(registry: Registry, fingerprint: str) -> Registration:
    """A worker of this layout, as etcd has it."""
    worker = registry_pb2.Worker(id=fingerprint, address="127.0.0.1:1", fingerprint=fingerprint)
    entry = await registry.register("workers", fingerprint, worker)
    assert await entry.registered(HANG_S)
    return entry


async def test_a_layout_without_users_gives_way_and_one_with_a_worker_stays(
    tmp_path: Path, etcd_address: str, peer: KvPeer
) -> None:
    """The fleet moves to another layout while the store is down. What a registered worker can still use stays, even if
    that worker is silent; after it has gone the store starts anew by itself."""
    flags = {"nvme_dir": tmp_path / "nvme", "nvme_gib": NVME_GIB, "layout_rest_s": 1.0}
    async with running(start_store(tmp_path, etcd_address, "before", **flags)) as client:
        await fill_disk(client, peer, keys(8))
    registry = Registry([etcd_address], "local")
    other = "e" * 24
    old = await registered(registry, FINGERPRINT)
    await registered(registry, other)
    after = start_store(tmp_path, etcd_address, "after", **flags)
    try:
        async with running(after) as client:

            async def fingerprint() -> str:
                stores = registry.view("kvstores", registry_pb2.KvStore).items()
                return stores["after"].fingerprint if "after" in stores else "unknown"

            async def blocks(wanted: int) -> bool:
                return (await nvme(client)).blocks == wanted

            await until(lambda: blocks(8), "the scan does not end")
            await asyncio.sleep(3 * flags["layout_rest_s"])
            assert await blocks(8), "a worker has this layout"
            pair = worker_pb2.PairRequest(peer=peer.peer, fingerprint=other)
            assert (await client.stub.Pair(pair, timeout=HANG_S)).HasField("failure")
            await old.withdraw()
            await until(lambda: blocks(0), "nobody has this layout any more")
            assert "nobody uses the layout of these blocks" in after.log()

            async def free() -> bool:
                return await fingerprint() == ""

            await until(free, "the registration still names the old layout")
            assert not (await client.stub.Pair(pair, timeout=HANG_S)).HasField("failure")
            assert (await client.stats()).evicted["layout"] == 8
            assert (await client.offer(peer.peer, peer.seal(keys(4), other))).stored == 4
            assert await read_all(client, peer, keys(4)) == 0, "of the old layout"
            async with client.lookup(keys(4), other) as found:
                assert await peer.read(found.peer, list(found.handles)) == ["ok"] * 4
            await client.settle()
    finally:
        await registry.close()


async def test_a_file_that_is_no_stores_is_left_alone(tmp_path: Path, etcd_address: str, peer: KvPeer) -> None:
    slab = tmp_path / "nvme" / "slab"
    slab.parent.mkdir()
    slab.write_bytes(b"minutes of a meeting")
    flags = {"nvme_dir": slab.parent, "nvme_gib": NVME_GIB}
    async with running(start_store(tmp_path, etcd_address, "stranger", **flags)) as client:
        assert "is no store's" in (await nvme(client)).state
        assert (await client.offer(peer.peer, peer.seal(keys(2), FINGERPRINT))).stored == 2
    assert slab.read_bytes() == b"minutes of a meeting"


async def test_a_slab_made_smaller_serves_what_lies_within_it(tmp_path: Path, etcd_address: str, peer: KvPeer) -> None:
    flags = {"nvme_dir": tmp_path / "nvme"}
    async with running(start_store(tmp_path, etcd_address, "large", nvme_gib=NVME_GIB, **flags)) as client:
        await fill_disk(client, peer, keys(8))
    half = (HEADER + DISK_SLOTS // 2 * (HEADER + BLOCK)) / 2**30
    small = start_store(tmp_path, etcd_address, "small", nvme_gib=half, **flags)
    async with running(small) as client:
        assert await counted(small, "open", "cut_off") == DISK_SLOTS // 2

        async def scanned() -> bool:
            return (await nvme(client)).state.startswith("ok")

        await until(scanned, "the scan does not end")
        left = await on_disk(client)
        assert [await read_all(client, peer, [key]) for key in left] == [1] * len(left)
        await client.settle()


def freezable(tmp_path: Path, mounted: Callable[..., Path]) -> Path:
    """A small file system of its own, which `fsfreeze` can stop. Skips the test without mkfs.ext4."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    if not command("mkfs.ext4", "-q", str(image)):
        pytest.skip("no mkfs.ext4")
    return mounted("ice", "-o", "loop", str(image))


async def test_a_full_disk_is_no_tier_and_a_frozen_one_a_miss(
    tmp_path: Path, etcd_address: str, peer: KvPeer, mounted: Callable[..., Path]
) -> None:
    """One store asks for more than there is. Another one's file system stops answering, and comes back."""
    small = mounted("small", "-t", "tmpfs", "-o", "size=1m", "tmpfs")
    ice = freezable(tmp_path, mounted)
    full = start_store(tmp_path, etcd_address, "full", nvme_dir=small / "kv", nvme_gib=1.0, quota="poor=0.0002")
    flags = {"nvme_dir": ice / "kv", "nvme_gib": NVME_GIB, "io_deadline_s": 0.5}
    frozen = start_store(tmp_path, etcd_address, "frozen", **flags)
    async with running(full) as client:
        tier = await nvme(client)
        assert tier.state.startswith("off: ")
        assert "No space left" in tier.state
        assert (await client.offer(peer.peer, peer.seal(keys(6), FINGERPRINT))).stored == 6
        assert await read_all(client, peer, keys(6)) == 6
        request = kvstore_pb2.OfferRequest(
            peer=peer.peer, handles=peer.seal(keys(6, first=10), FINGERPRINT), deadline_s=20.0, tenant="poor"
        )
        reply = await client.stub.Offer(request, timeout=HANG_S)
        assert (reply.stored, dict(reply.refused)) == (3, {"QUOTA_EXCEEDED": 3})
        assert await client.stub.Clear(kvstore_pb2.ClearRequest(tenant="poor"), timeout=HANG_S)
        await client.settle()
    async with running(frozen) as client:
        await fill_disk(client, peer, keys(8))
        for start in range(8, 8 + SLOTS + 8, 4):
            handles = peer.seal(keys(start + 4), FINGERPRINT)[start:]
            await client.offer(peer.peer, handles)
        assert command("fsfreeze", "-f", str(ice))
        try:
            # writes hang now, for as long as anybody likes; whoever asks is told in time
            for start in range(8, 32, 4):
                names = keys(4, first=start)
                await client.offer(peer.peer, peer.seal(keys(start + 4), FINGERPRINT)[start:])
                assert await read_all(client, peer, names, deadline_s=2.0) == 4

            async def noticed() -> bool:
                await read_all(client, peer, keys(4, first=28), deadline_s=2.0)  # wants them written
                return (await nvme(client)).state.startswith("open")

            await until(noticed, "a disk that hangs is not noticed")
        finally:
            assert command("fsfreeze", "-u", str(ice))

        async def back() -> bool:
            names = keys(2, first=random.Random().randrange(30))
            await client.offer(peer.peer, peer.seal(keys(BLOCKS), FINGERPRINT)[:2])
            await read_all(client, peer, names, deadline_s=2.0)
            await read_all(client, peer, keys(2), deadline_s=2.0)
            return (await nvme(client)).state.startswith("ok")

        await until(back, "the disk is back and nobody uses it")
        await client.settle()


async def test_a_disk_without_room_in_mid_run(
    tmp_path: Path, etcd_address: str, peer: KvPeer, mounted: Callable[..., Path]
) -> None:
    """What was preallocated cannot run out by itself. It can be taken away (a thin volume, a snapshot, a tool that
    makes files sparse): here a hole is punched into the slab, and another file takes the room."""
    small = mounted("small", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    slab, ballast = small / "kv" / "slab", small / "ballast"
    store = start_store(tmp_path, etcd_address, "later", nvme_dir=slab.parent, nvme_gib=NVME_GIB)
    async with running(store) as client:
        await fill_disk(client, peer, keys(8))
        for first in range(8, 8 + SLOTS, 4):
            await client.offer(peer.peer, peer.seal(keys(4, first=first), FINGERPRINT))
        lost = await on_disk(client, alone=True)
        assert lost
        hole = slab.stat().st_size - HEADER
        assert command("fallocate", "--punch-hole", f"--offset={HEADER}", f"--length={hole}", str(slab))
        with ballast.open("wb", buffering=0) as file:
            while shutil.disk_usage(small).free:
                file.write(bytes(HEADER))
        # the headers cannot even be overwritten: they are misses all the same
        assert [await read_all(client, peer, [name]) for name in lost] == [0] * len(lost)
        assert (await client.stats()).evicted["corrupt"] == len(lost)
        assert await verify(client) == 8 - len(lost), "these the host has, too"
        names = keys(4, first=30)
        assert (await client.offer(peer.peer, peer.seal(names, FINGERPRINT))).stored == 4

        async def state(wanted: str) -> bool:
            assert await read_all(client, peer, names) == 4  # and wants them written
            return (await nvme(client)).state.startswith(wanted)

        await until(lambda: state("open"), "a disk without room is not noticed")
        assert await counted(store, "store", "error") >= 3
        ballast.unlink()
        await until(lambda: state("ok"), "there is room again and nobody uses it")

        async def written() -> bool:
            assert await read_all(client, peer, names) == 4
            return set(names) <= set(await on_disk(client))

        await until(written, "there is room again and nothing is written")
        await all_right_from_disk(client, peer)
        await client.settle()


async def test_a_disk_that_stalls_for_seconds(
    tmp_path: Path, etcd_address: str, peer: KvPeer, mounted: Callable[..., Path]
) -> None:
    """Longer than the deadline that a store has by itself: what the host has is served all the time."""
    ice = freezable(tmp_path, mounted)
    store = start_store(tmp_path, etcd_address, "stalled", nvme_dir=ice / "kv", nvme_gib=NVME_GIB)
    async with running(store) as client:
        await fill_disk(client, peer, keys(8))
        before = await counted(store, "store", "ok")
        assert command("fsfreeze", "-f", str(ice))
        try:
            stalled = time.monotonic()

            async def noticed() -> bool:
                names = keys(4, first=random.Random().randrange(100, 1000))
                reply = await client.offer(peer.peer, peer.seal(names, FINGERPRINT))
                assert reply.stored + reply.known == 4
                assert await read_all(client, peer, names, deadline_s=2.0) == 4  # and wants them written
                await read_all(client, peer, keys(8), deadline_s=2.0)  # of the disk: all of it right, if not all of it
                over = time.monotonic() - stalled > STALL_S
                return over and (await nvme(client)).state.startswith("open")

            await until(noticed, "a disk that hangs is not noticed")
            assert await counted(store, "store", "late") >= 3
            assert await counted(store, "store", "ok") == before
        finally:
            assert command("fsfreeze", "-u", str(ice))
        names = keys(4, first=2000)
        await client.offer(peer.peer, peer.seal(names, FINGERPRINT))

        async def written() -> bool:
            await read_all(client, peer, names)  # wants them written
            return set(names) <= set(await on_disk(client))

        await until(written, "the disk is back and nobody uses it")
        assert (await nvme(client)).state.startswith("ok")
        await all_right_from_disk(client, peer)
        await client.settle()
