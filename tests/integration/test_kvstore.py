"""The store as a real process, between processes that offer and processes that read."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from baton.v1 import kv_pb2, kvstore_pb2, kvstore_pb2_grpc, registry_pb2, worker_pb2
from tests.etcd import EtcdServer
from tests.kv_peer import KvPeer
from tests.worker_process import WorkerProcess

pytestmark = pytest.mark.integration

HANG_S = 60.0
BLOCK = 64 * 1024
SLOTS = 16
FINGERPRINT = "f" * 24


@pytest.fixture(scope="module")
def etcd_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server.address


def start_store(directory: Path, etcd_address: str, id: str = "kvstore-1", **flags: object) -> WorkerProcess:
    capacity = SLOTS * BLOCK / 2**30
    return WorkerProcess("kvstore", id, directory, **{"etcd": etcd_address, "capacity_gib": capacity, **flags})


def scrape(url: str) -> str:
    """The metrics page."""
    with urllib.request.urlopen(url, timeout=20) as page:
        return str(page.read().decode())


class Client:
    """A gRPC client of one store."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = kvstore_pb2_grpc.KvStoreServiceStub(self.channel)

    async def offer(
        self, peer: kv_pb2.Peer, handles: list[kv_pb2.Handle], deadline_s: float = 20.0
    ) -> kvstore_pb2.OfferReply:
        request = kvstore_pb2.OfferRequest(peer=peer, handles=handles, deadline_s=deadline_s)
        return await self.stub.Offer(request, timeout=HANG_S)

    @contextlib.asynccontextmanager
    async def lookup(self, keys: list[bytes], fingerprint: str = FINGERPRINT) -> AsyncIterator[kvstore_pb2.LookupReply]:
        """The reply; pinned until the context ends."""
        call = self.stub.Lookup(kvstore_pb2.LookupRequest(keys=keys, fingerprint=fingerprint), timeout=HANG_S)
        try:
            yield await call.read()
        finally:
            call.cancel()

    async def stats(self) -> kvstore_pb2.StatsReply:
        return await self.stub.Stats(kvstore_pb2.StatsRequest(), timeout=HANG_S)

    async def clear(self, fingerprint: str = "") -> int:
        return (await self.stub.Clear(kvstore_pb2.ClearRequest(fingerprint=fingerprint), timeout=HANG_S)).dropped

    async def settle(self) -> None:
        """Wait until every slot, pin and call is accounted for."""
        end = time.monotonic() + HANG_S / 2
        while True:
            reply = await self.stub.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), timeout=HANG_S)
            if not reply.findings:
                return
            assert time.monotonic() < end, list(reply.findings)
            await asyncio.sleep(0.05)


@pytest.fixture
async def store(tmp_path: Path, etcd_address: str) -> AsyncIterator[Client]:
    """A store of this test's own, clean at the end."""
    with start_store(tmp_path, etcd_address) as process:
        client = Client(process.address)
        try:
            yield client
            await client.settle()
        finally:
            await client.channel.close()
            process.kill()  # how it leaves has a test of its own; saying goodbye takes a second


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[list[KvPeer]]:
    """Peers put here are ended at the end."""
    started: list[KvPeer] = []
    yield started
    for peer in started:
        peer.stop()


def start_peer(peers: list[KvPeer], directory: Path, id: str, transports: str = "nixl,tcp", blocks: int = 32) -> KvPeer:
    peer = KvPeer(id, directory, blocks=blocks, block_bytes=BLOCK, transports=transports)
    peers.append(peer)
    return peer


def keys(count: int, first: int = 0) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(first, first + count)]


@pytest.mark.parametrize("transports", ["tcp", pytest.param("nixl,tcp", marks=pytest.mark.nixl)])
async def test_what_one_offers_another_reads_and_verifies(
    store: Client, peers: list[KvPeer], tmp_path: Path, transports: str
) -> None:
    writer = start_peer(peers, tmp_path, "writer", transports)
    reader = start_peer(peers, tmp_path, "reader", transports)
    handles = writer.seal(keys(5), FINGERPRINT)
    reply = await store.offer(writer.peer, handles)
    assert (reply.stored, reply.known, dict(reply.refused)) == (5, 0, {})
    writer.stop()  # the store has its own copy
    async with store.lookup(keys(8)) as found:
        assert [h.key for h in found.handles] == keys(5)
        assert {h.owner for h in found.handles} == {"kvstore-1"}
        assert {h.epoch for h in found.handles} == {found.peer.epoch}
        assert found.handles[0].checksum != handles[0].checksum, "sealed under the store's own epoch"
        assert await reader.read(found.peer, list(found.handles)) == ["ok"] * 5
    stats = await store.stats()
    assert (stats.hits, stats.misses) == (5, 3)
    assert stats.tiers[0].blocks == 5


async def test_known_blocks_are_not_read_again(store: Client, peers: list[KvPeer], tmp_path: Path) -> None:
    writer = start_peer(peers, tmp_path, "writer")
    handles = writer.seal(keys(4), FINGERPRINT)
    assert (await store.offer(writer.peer, handles[:2])).stored == 2
    reply = await store.offer(writer.peer, [*handles, handles[3]])
    assert (reply.stored, reply.known) == (2, 3)


async def test_a_flipped_byte_is_not_stored(store: Client, peers: list[KvPeer], tmp_path: Path) -> None:
    writer = start_peer(peers, tmp_path, "writer")
    handles = writer.seal(keys(3), FINGERPRINT)
    writer.flip(1)
    reply = await store.offer(writer.peer, handles)
    assert reply.stored == 2
    assert dict(reply.refused) == {"KV_CHECKSUM_MISMATCH": 1}
    async with store.lookup(keys(3)) as found:
        assert [h.key for h in found.handles] == keys(1), "a prefix ends where a block is missing"


async def test_capacity_evicts_the_oldest_and_pins_survive(store: Client, peers: list[KvPeer], tmp_path: Path) -> None:
    writer = start_peer(peers, tmp_path, "writer", blocks=64)
    reader = start_peer(peers, tmp_path, "reader")
    handles = writer.seal(keys(40), FINGERPRINT)
    assert (await store.offer(writer.peer, handles[:8])).stored == 8
    async with store.lookup(keys(4)) as pinned:
        assert len(pinned.handles) == 4
        for start in range(8, 40, 4):
            assert (await store.offer(writer.peer, handles[start : start + 4])).stored == 4
        assert (await store.stats()).evicted["capacity"] >= 40 - SLOTS
        assert await reader.read(pinned.peer, list(pinned.handles)) == ["ok"] * 4
        async with store.lookup(keys(1, first=4)) as gone:
            assert not gone.handles
    async with store.lookup(keys(4)) as still:
        assert len(still.handles) == 4
    assert (await store.stats()).tiers[0].blocks <= SLOTS


async def test_everything_pinned_refuses_instead_of_waiting(store: Client, peers: list[KvPeer], tmp_path: Path) -> None:
    writer = start_peer(peers, tmp_path, "writer")
    handles = writer.seal(keys(SLOTS + 4), FINGERPRINT)
    for start in range(0, SLOTS - 1, 5):
        await store.offer(writer.peer, handles[start : start + 5])
    async with store.lookup(keys(SLOTS)) as pinned:
        held = len(pinned.handles)
        assert held >= SLOTS - 2
        reply = await store.offer(writer.peer, handles[-4:])
        assert reply.stored == SLOTS - held
        assert reply.refused["NO_CAPACITY"] == 4 - reply.stored


async def test_another_layout_is_refused_by_name_until_cleared(
    store: Client, peers: list[KvPeer], tmp_path: Path
) -> None:
    writer = start_peer(peers, tmp_path, "writer")
    handles = writer.seal(keys(2), FINGERPRINT)
    await store.offer(writer.peer, handles)
    others = writer.seal(keys(2), "0" * 24)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await store.offer(writer.peer, others)
    assert "KV_LAYOUT_MISMATCH" in str(dict(refused.value.trailing_metadata() or ()))
    async with store.lookup(keys(2), "0" * 24) as found:
        assert not found.handles
    assert await store.clear("0" * 24) == 0
    assert await store.clear(FINGERPRINT) == 2
    assert (await store.offer(writer.peer, others)).stored == 2


async def test_cleared_while_a_reader_holds_it(store: Client, peers: list[KvPeer], tmp_path: Path) -> None:
    writer = start_peer(peers, tmp_path, "writer")
    reader = start_peer(peers, tmp_path, "reader")
    await store.offer(writer.peer, writer.seal(keys(3), FINGERPRINT))
    async with store.lookup(keys(3)) as pinned:
        assert await store.clear() == 3
        async with store.lookup(keys(3)) as found:
            assert not found.handles
        assert await reader.read(pinned.peer, list(pinned.handles)) == ["ok"] * 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_offerer_goes_away_in_the_middle(
    store: Client, peers: list[KvPeer], tmp_path: Path, number: signal.Signals
) -> None:
    """Killed or stopped: the offer ends within its deadline, nothing wrong is stored, no slot is lost."""
    writer = start_peer(peers, tmp_path, "writer")
    handles = writer.seal(keys(12), FINGERPRINT)
    assert (await store.offer(writer.peer, handles[:1])).stored == 1
    writer.signal(number)
    reply = await store.offer(writer.peer, handles[1:], deadline_s=2.0)
    assert reply.stored + sum(reply.refused.values()) == 11
    async with store.lookup(keys(12)) as found:
        assert len(found.handles) == 1 + reply.stored
    writer.stop()
    other = start_peer(peers, tmp_path, "other")
    again = await store.offer(other.peer, other.seal(keys(12), FINGERPRINT))
    assert again.stored + again.known == 12


async def test_a_caller_that_leaves_does_not_leak(store: Client, peers: list[KvPeer], tmp_path: Path) -> None:
    writer = start_peer(peers, tmp_path, "writer")
    handles = writer.seal(keys(10), FINGERPRINT)
    for _ in range(5):
        task = asyncio.ensure_future(store.offer(writer.peer, handles))
        await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await store.settle()
    reply = await store.offer(writer.peer, handles)
    assert reply.stored + reply.known == 10


async def test_a_store_that_leaves_waits_for_what_is_held(
    peers: list[KvPeer], tmp_path: Path, etcd_address: str
) -> None:
    with start_store(tmp_path, etcd_address, "kvstore-leaves", drain_s=HANG_S) as process:
        client = Client(process.address)
        writer = start_peer(peers, tmp_path, "writer", "tcp")
        await client.offer(writer.peer, writer.seal(keys(2), FINGERPRINT))
        async with client.lookup(keys(2)) as held:
            process.process.terminate()
            end = time.monotonic() + HANG_S
            refused: grpc.aio.AioRpcError | None = None
            while refused is None:
                assert time.monotonic() < end
                try:
                    async with client.lookup(keys(2)) as found:
                        assert len(found.handles) == 2
                except grpc.aio.AioRpcError as error:
                    refused = error
            assert ("baton-reason", "DRAINING") in tuple(refused.trailing_metadata() or ())
            assert process.process.poll() is None
            reader = start_peer(peers, tmp_path, "reader", "tcp")
            assert await reader.read(held.peer, list(held.handles)) == ["ok"] * 2
        await client.channel.close()
        assert await asyncio.to_thread(process.process.wait, HANG_S) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"owner": "somebody"}, "INVALID_REQUEST"),
        ({"tokens": 31}, "INVALID_REQUEST"),
        ({"key": b"short"}, "INVALID_REQUEST"),
        ({"fingerprint": ""}, "INVALID_REQUEST"),
        ({"segments": []}, "INVALID_REQUEST"),
    ],
)
async def test_a_wrong_offer_is_refused_as_a_whole(
    store: Client, peers: list[KvPeer], tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    writer = start_peer(peers, tmp_path, "writer", "tcp")
    (handle,) = writer.seal(keys(1), FINGERPRINT)
    for name, value in change.items():
        handle.ClearField(name)  # type: ignore[arg-type]
        if value:
            setattr(handle, name, value)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await store.offer(writer.peer, [handle])
    assert reason in str(dict(refused.value.trailing_metadata() or ()))
    with pytest.raises(grpc.aio.AioRpcError):
        await store.offer(writer.peer, [])


async def test_a_handle_outside_the_offerers_arena_is_refused_alone(
    store: Client, peers: list[KvPeer], tmp_path: Path
) -> None:
    writer = start_peer(peers, tmp_path, "writer")
    handles = writer.seal(keys(3), FINGERPRINT)
    handles[1].segments[0].offset = writer.peer.arena_bytes
    reply = await store.offer(writer.peer, handles)
    assert reply.stored == 2
    assert dict(reply.refused) == {"KV_BAD_HANDLE": 1}


async def test_watch_tells_a_snapshot_and_every_change(store: Client, peers: list[KvPeer], tmp_path: Path) -> None:
    writer = start_peer(peers, tmp_path, "writer", blocks=64)
    handles = writer.seal(keys(24), FINGERPRINT)
    await store.offer(writer.peer, handles[:3])
    call = store.stub.Watch(worker_pb2.WatchRequest(), timeout=HANG_S)
    here: set[bytes] = set()
    numbers = []

    async def until(wanted: set[bytes]) -> None:
        while here != wanted or not numbers:
            update = await call.read()
            if not update.HasField("cache"):
                continue  # a tier's speed
            numbers.append(update.cache.seq)
            assert update.cache.tier == "host"
            if update.cache.cleared:
                here.clear()
            here.difference_update(update.cache.removed)
            here.update(update.cache.stored)

    await until(set(keys(3)))
    await store.offer(writer.peer, handles[3:12])
    await until(set(keys(12)))
    await store.offer(writer.peer, handles[12:24])
    async with store.lookup(keys(24)) as found:
        assert not found.handles, "the first ones were evicted"
    present = (await store.stats()).tiers[0].blocks
    while len(here) != present:
        update = await call.read()
        if not update.HasField("cache"):
            continue
        numbers.append(update.cache.seq)
        here.difference_update(update.cache.removed)
        here.update(update.cache.stored)
    await store.clear()
    await until(set())
    assert numbers == list(range(1, len(numbers) + 1))
    call.cancel()


async def test_registration_tells_the_layout_and_goes_with_the_process(
    tmp_path: Path, etcd_address: str, peers: list[KvPeer]
) -> None:
    from baton.registry import Registry

    registry = Registry([etcd_address], "local")
    try:
        view = registry.view("kvstores", registry_pb2.KvStore)

        async def see(wanted: object) -> registry_pb2.KvStore | None:
            end = time.monotonic() + HANG_S
            while time.monotonic() < end:
                entry = view.items().get("kvstore-reg")
                if (entry and entry.fingerprint) == wanted:
                    return entry
                await asyncio.sleep(0.05)
            raise AssertionError(f"never {wanted!r}: {view.items()}")

        with start_store(tmp_path, etcd_address, "kvstore-reg") as process:
            entry = await see("")
            assert entry is not None
            assert entry.address == process.address
            assert entry.capacity_bytes == SLOTS * BLOCK
            client = Client(process.address)
            writer = start_peer(peers, tmp_path, "writer", "tcp")
            await client.offer(writer.peer, writer.seal(keys(2), FINGERPRINT))
            await see(FINGERPRINT)
            text = await asyncio.to_thread(scrape, process.metrics)
            assert "baton_kvstore_stored_blocks_total 2.0" in text
            assert 'baton_kvstore_used_bytes{tier="host"} 131072.0' in text
            await client.clear()
            await see("")
            await client.channel.close()
            process.process.terminate()
            assert process.process.wait(HANG_S) == 0
        await see(None)
    finally:
        await registry.close()
