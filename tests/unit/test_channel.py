"""Channels follow the processes that are behind addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from baton.cli.ports import free_port
from baton.registry.registry import encode
from baton.registry.view import View
from baton.rpc.channel import Channels
from baton.rpc.server import RpcServer
from baton.v1 import kvstore_pb2, kvstore_pb2_grpc, registry_pb2

HANG_S = 20.0


class Answering(kvstore_pb2_grpc.KvStoreServiceServicer):
    """`Stats` answers when the gate is open."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()

    async def Stats(self, request: kvstore_pb2.StatsRequest, context: Any) -> kvstore_pb2.StatsReply:
        self.asked.set()
        await self.gate.wait()
        return kvstore_pb2.StatsReply(hits=7)


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    found = Channels()
    yield found
    await found.close()


def followed(channels: Channels) -> Callable[[str, registry_pb2.KvStore | None], None]:
    """The channels follow a view; the function changes it."""
    view: View[registry_pb2.KvStore] = View("kvstores", registry_pb2.KvStore)
    channels.follow(view)

    def change(id: str, store: registry_pb2.KvStore | None) -> None:
        view.change(id, encode(store) if store is not None else b"")

    return change


async def serve(service: Answering, port: int = 0) -> tuple[RpcServer, str]:
    server = RpcServer("127.0.0.1", port)
    server.add(kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server, service, "baton.v1.KvStoreService")
    return server, f"127.0.0.1:{await server.start()}"


def store(address: str, epoch: int, **fields: Any) -> registry_pb2.KvStore:
    return registry_pb2.KvStore(id="s", epoch=epoch, address=address, **fields)


async def test_another_process_at_an_address_gets_another_channel(channels: Channels) -> None:
    change = followed(channels)
    change("s", store("127.0.0.1:1", 5))
    first, other = channels.get("127.0.0.1:1"), channels.get("127.0.0.1:2")
    change("s", store("127.0.0.1:1", 5, fingerprint="told later"))
    assert channels.get("127.0.0.1:1") is first
    change("s", store("127.0.0.1:1", 6))
    second = channels.get("127.0.0.1:1")
    assert second is not first
    change("s", None)
    assert channels.get("127.0.0.1:1") is not second
    assert channels.get("127.0.0.1:2") is other


async def test_who_waits_for_a_connection_waits_for_the_new_channel(channels: Channels) -> None:
    """The address refuses connections; when another process has it, nobody waits out the pause of the old channel."""
    change, port = followed(channels), free_port()
    change("s", store(f"127.0.0.1:{port}", 5))
    waiting = asyncio.create_task(channels.connected(f"127.0.0.1:{port}"))
    old = channels.get(f"127.0.0.1:{port}")
    while old.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:  # noqa: ASYNC110 - gRPC tells nobody
        await asyncio.sleep(0.01)
    change("s", store(f"127.0.0.1:{port}", 6))
    server, _ = await serve(Answering(), port)
    try:
        async with asyncio.timeout(HANG_S):
            await waiting
        assert channels.get(f"127.0.0.1:{port}").get_state() is grpc.ChannelConnectivity.READY
        assert old.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    finally:
        await server.stop(0)


async def test_calls_in_flight_end_by_themselves(channels: Channels) -> None:
    service = Answering()
    server, address = await serve(service)
    try:
        change = followed(channels)
        change("s", store(address, 5))
        stub: kvstore_pb2_grpc.KvStoreServiceAsyncStub = kvstore_pb2_grpc.KvStoreServiceStub(channels.get(address))
        asking = asyncio.ensure_future(stub.Stats(kvstore_pb2.StatsRequest(), timeout=HANG_S))
        async with asyncio.timeout(HANG_S):
            await service.asked.wait()
        change("s", None)
        await asyncio.sleep(0.1)  # for a close that does not wait
        service.gate.set()
        assert (await asking).hits == 7
    finally:
        await server.stop(0)


async def test_another_id_at_an_address_gets_another_channel_and_keeps_it(channels: Channels) -> None:
    """A store without a fixed id comes back under another one, and the old entry lapses later."""
    change, port = followed(channels), free_port()
    address = f"127.0.0.1:{port}"
    change("old", store(address, 5))
    first = channels.get(address)
    change("new", store(address, 6))
    second = channels.get(address)
    assert second is not first
    change("old", None)
    assert channels.get(address) is second


async def test_who_comes_back_gets_another_channel_than_was_tried_while_it_was_away(channels: Channels) -> None:
    change = followed(channels)
    change("s", store("127.0.0.1:1", 5))
    change("s", None)
    tried = channels.get("127.0.0.1:1")
    change("s", store("127.0.0.1:1", 6))
    assert channels.get("127.0.0.1:1") is not tried


async def test_closing_ends_who_waits_for_a_connection(channels: Channels) -> None:
    waiting = asyncio.create_task(channels.connected(f"127.0.0.1:{free_port()}"))
    await asyncio.sleep(0.05)
    await channels.close()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(grpc.aio.UsageError):
            await waiting


async def test_closing_waits_for_no_call(channels: Channels) -> None:
    service = Answering()
    server, address = await serve(service)
    try:
        stub: kvstore_pb2_grpc.KvStoreServiceAsyncStub = kvstore_pb2_grpc.KvStoreServiceStub(channels.get(address))
        asking = asyncio.ensure_future(stub.Stats(kvstore_pb2.StatsRequest(), timeout=HANG_S))
        async with asyncio.timeout(HANG_S):
            await service.asked.wait()
            channels.retire(address)
            await asyncio.sleep(0.05)  # it is being closed now
            await channels.close()
        service.gate.set()
        assert (await asking).hits == 7
    finally:
        await server.stop(0)
