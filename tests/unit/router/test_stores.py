"""The stores as a router sees them: streams, gaps, restarts, quarantine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.rpc.limits import SERVER_OPTIONS
from baton.rpc.tasks import Background
from baton.v1 import kv_pb2, kvstore_pb2, kvstore_pb2_grpc, registry_pb2, worker_pb2
from services.router.index import PrefixIndex
from services.router.loads import LoadRates
from services.router.quarantine import Quarantine
from services.router.stores import Stores
from tests.faults.proxy import proxy

HANG_S = 30.0
KEYS = [bytes([n]) * 16 for n in range(6)]


class ScriptedStore(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Whoever watches gets what `say` is given, after an empty snapshot."""

    def __init__(self) -> None:
        self.epoch = 1
        self.watches = 0
        self.seq = 0
        self.updates: asyncio.Queue[kvstore_pb2.StoreUpdate | None] = asyncio.Queue()

    async def Watch(  # type: ignore[override]
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self.watches += 1
        self.seq = 0
        await context.write(self.update(cleared=True))
        while (update := await self.updates.get()) is not None:
            await context.write(update)

    def update(self, tier: str = "host", skip: int = 0, **fields: object) -> kvstore_pb2.StoreUpdate:
        """The next event."""
        self.seq += 1 + skip
        event = kv_pb2.CacheEvent(seq=self.seq, tier=tier, **fields)  # type: ignore[arg-type]
        return kvstore_pb2.StoreUpdate(epoch=self.epoch, cache=event)

    def say(self, update: kvstore_pb2.StoreUpdate | None) -> None:
        """Send it; None ends the stream."""
        self.updates.put_nowait(update)


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[ScriptedStore, registry_pb2.KvStore]]:
    """A store that serves, and its registration."""
    store, server = ScriptedStore(), grpc.aio.server(options=SERVER_OPTIONS)
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(store, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield store, registry_pb2.KvStore(id="s", epoch=1, address=f"127.0.0.1:{port}", fingerprint="f")
    finally:
        await server.stop(None)


class Known:
    """Stores with what they keep up to date."""

    def __init__(self) -> None:
        self.background = Background("test")
        self.index, self.loads = PrefixIndex(1000), LoadRates()
        self.quarantine = Quarantine(first_s=0.02, most_s=0.2, random_=random.Random(1))
        self.stores = Stores(self.background, self.index, self.loads, self.quarantine)

    async def until(self, wanted: Callable[[], object]) -> None:
        async with asyncio.timeout(HANG_S):
            while not wanted():  # noqa: ASYNC110 - what is waited for happens in many places
                await asyncio.sleep(0.005)

    def found(self) -> dict[str, int]:
        return self.index.look_up(b"".join(KEYS)).stores.get("s", {})


async def told(known: Known, store: ScriptedStore, message: registry_pb2.KvStore) -> None:
    """The store is registered, watched, and has told of KEYS."""
    known.stores.registered("s", message)
    await known.until(lambda: known.stores.usable("s"))
    store.say(store.update(stored=KEYS))
    await known.until(known.found)


@pytest.fixture
async def known() -> AsyncIterator[Known]:
    found = Known()
    yield found
    assert found.index.check_integrity() == []
    found.stores.close()
    await found.background.close()
    assert found.background.failures == 0
    assert len(found.index) == 0


async def test_a_store_is_usable_when_its_stream_stands_and_its_tiers_are_indexed(known: Known) -> None:
    async with scripted() as (store, message):
        known.stores.registered("s", message)
        assert known.stores.usable("s") is None
        await known.until(lambda: known.stores.usable("s"))
        store.say(store.update(stored=KEYS[:2]))
        store.say(store.update("nvme", stored=KEYS))
        await known.until(lambda: known.found() == {"host": 2, "nvme": 4})
        store.say(store.update(removed=KEYS[:2]))
        await known.until(lambda: known.found() == {"nvme": 6})


async def test_what_a_store_measured_of_its_tiers_is_believed(known: Known) -> None:
    async with scripted() as (store, message):
        known.stores.registered("s", message)
        before = known.loads.seconds("s", "host", "w", 1e8, 0.0)
        tier = kvstore_pb2.Tier(name="host", read_bytes_s=1e7, read_latency_s=0.001)
        store.say(kvstore_pb2.StoreUpdate(epoch=1, tiers=[tier]))
        await known.until(lambda: known.loads.seconds("s", "host", "w", 1e8, 0.0) > before)


async def test_a_gap_subscribes_again(known: Known) -> None:
    async with scripted() as (store, message):
        await told(known, store, message)
        store.say(store.update(skip=1, stored=KEYS[:1]))
        await known.until(lambda: store.watches == 2 and known.stores.usable("s"))
        assert known.found() == {}


async def test_a_stream_that_ends_puts_the_store_out_until_it_answers(known: Known) -> None:
    async with scripted() as (store, message):
        await told(known, store, message)
        store.say(None)
        await known.until(lambda: not known.found())
        await known.until(lambda: known.stores.usable("s"))
        assert store.watches == 2


async def test_a_store_whose_host_is_gone_without_a_word_is_put_out(known: Known) -> None:
    async with scripted() as (store, message), proxy(message.address) as wire:
        message.address = wire.address
        await told(known, store, message)
        wire.mute()
        await known.until(lambda: known.quarantine.why("s"))
        assert known.found() == {}
        await known.until(lambda: known.stores.usable("s"))
        assert store.watches == 2


async def test_a_store_that_does_not_say_what_it_promised_is_put_out_until_it_speaks(known: Known) -> None:
    """Its connection is in order and answers pings: its loop is stuck."""
    async with scripted() as (store, message):
        await told(known, store, message)
        (one,) = known.stores.all()
        assert known.stores.why_not(one) == ""
        store.say(kvstore_pb2.StoreUpdate(epoch=1, alive_s=0.05))
        await known.until(lambda: known.quarantine.why("s"))
        assert known.stores.state(one) == "quarantined"
        assert known.stores.why_not(one) == "quarantined: is silent"
        assert known.found() == {}
        await known.until(lambda: known.stores.usable("s"))
        assert store.watches == 2


async def test_another_process_under_the_name_is_not_believed(known: Known) -> None:
    async with scripted() as (store, message):
        store.epoch = 2
        known.stores.registered("s", message)
        await known.until(lambda: store.watches >= 2)
        assert known.stores.usable("s") is None
        message.epoch = 2
        known.stores.registered("s", registry_pb2.KvStore.FromString(message.SerializeToString()))
        await known.until(lambda: known.stores.usable("s"))


async def test_a_store_that_leaves_is_forgotten(known: Known) -> None:
    async with scripted() as (store, message):
        await told(known, store, message)
        known.stores.registered("s", None)
        assert known.found() == {}
        assert list(known.stores.all()) == []


async def test_one_that_cannot_be_reached_is_asked_again(known: Known) -> None:
    known.stores.registered("s", registry_pb2.KvStore(id="s", epoch=1, address="127.0.0.1:1"))
    await known.until(lambda: known.quarantine.why("s"))
    (one,) = known.stores.all()
    assert known.stores.state(one) == "quarantined"
