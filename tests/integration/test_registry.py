"""The registry against a real etcd, in every way that etcd, the lease or the process can go."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from baton.cli.ports import free_port
from baton.errors import BatonError, Reason
from baton.registry import Credentials, EtcdClient, EtcdRefused, Registry, View
from baton.registry.watch import PrefixWatch
from baton.v1 import etcd_pb2, kv_pb2
from baton.v1.registry_pb2 import ModelCard, StandingLayout, Worker
from tests.etcd import EtcdServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
HANG_S = 60.0
WORKERS = b"/baton/v1/test/workers/"


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; only a hang fails."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - the condition is another process' doing
            await asyncio.sleep(0.02)
    assert condition(), what


@asynccontextmanager
async def registry(*endpoints: str, credentials: Credentials | None = None) -> AsyncIterator[Registry]:
    """A registry of the test's cluster, closed whatever happens; afterwards none of its tasks is left."""
    opened = Registry(endpoints, "test", credentials=credentials)
    try:
        await opened.start()
        yield opened
    finally:
        await opened.close()
        assert not opened._tasks
        assert not any(view.suspects() for view in opened._views.values())


@asynccontextmanager
async def client(*endpoints: str) -> AsyncIterator[EtcdClient]:
    """A bare client."""
    opened = EtcdClient(endpoints)
    try:
        yield opened
    finally:
        await opened.close()


class Seen:
    """What a subscriber was told, in order."""

    def __init__(self, view: View[Worker]) -> None:
        self.told: list[tuple[str, str | None]] = []
        view.subscribe(lambda id, worker: self.told.append((id, worker.address if worker else None)))

    @property
    def removed(self) -> list[str]:
        """Ids that were told to be gone."""
        return [id for id, address in self.told if address is None]


def worker(id: str, address: str = "127.0.0.1:1") -> Worker:
    """A registry value."""
    return Worker(id=id, address=address, epoch=2**63 + 5)


async def answers(worker: Worker) -> bool:
    """A direct question to the process: does its port say hello?"""
    host, port = worker.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        return await reader.read(5) == b"hello"
    finally:
        writer.close()


@contextmanager
def registrant(etcd: EtcdServer, id: str) -> Iterator[subprocess.Popen[str]]:
    """A process that registers and listens."""
    command = [sys.executable, "-m", "tests.registrant", etcd.address, id]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        yield process
    finally:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


async def test_register_update_withdraw_are_seen_by_others(etcd: EtcdServer) -> None:
    async with registry(etcd.address) as one, registry(etcd.address) as other:
        view = other.view("workers", Worker)
        seen = Seen(view)
        assert await view.synced(HANG_S)
        assert not view.items()

        registration = await one.register("workers", "w1", worker("w1", "a:1"))
        assert await registration.registered(HANG_S)
        await until(lambda: "w1" in view.items(), "registered")
        assert view.items()["w1"] == worker("w1", "a:1")
        assert await registration.update(worker("w1", "a:2"), HANG_S)
        await registration.withdraw()
        await registration.withdraw()
        await until(lambda: not view.items(), "withdrawn")
        assert seen.told == [("w1", "a:1"), ("w1", "a:2"), ("w1", None)]
        assert other.view("workers", Worker) is view
    async with client(etcd.address) as raw:
        assert (await raw.list(b"/baton/"))[0] == {}


async def test_late_viewer_gets_what_is_there(etcd: EtcdServer) -> None:
    async with registry(etcd.address) as one, registry(etcd.address) as other:
        for n in range(20):
            assert await (await one.register("workers", f"w{n}", worker(f"w{n}"))).registered(HANG_S)
        view = other.view("workers", Worker)
        assert await view.synced(HANG_S)
        assert set(view.items()) == {f"w{n}" for n in range(20)}
        assert [id for id, _ in Seen(view).told] == list(view.items())


async def test_goodbye_needs_no_confirmation(etcd: EtcdServer) -> None:
    asked: list[str] = []

    async def confirm(worker: Worker) -> bool:
        asked.append(worker.id)
        return True

    async with registry(etcd.address) as one, registry(etcd.address) as other:
        view = other.view("workers", Worker, confirm)
        registration = await one.register("workers", "w1", worker("w1"))
        await until(lambda: "w1" in view.items(), "registered")
        await registration.withdraw()
        await until(lambda: not view.items(), "withdrawn")
        assert not asked


@pytest.mark.parametrize("empty", [False, True], ids=["same-data", "empty-data"])
async def test_kill_and_restart_removes_nobody(etcd: EtcdServer, empty: bool) -> None:
    async with registry(etcd.address) as one, registry(etcd.address) as other:
        view = other.view("workers", Worker)
        seen = Seen(view)
        registrations = [await one.register("workers", id, worker(id)) for id in ("w1", "w2")]
        await until(lambda: len(view.items()) == 2, "registered")

        etcd.kill()
        await until(lambda: not one.state.connected, "loss is known")
        assert set(view.items()) == {"w1", "w2"}
        etcd.restart(empty=empty)
        # What is registered after etcd came back is seen, and what was there before is there again.
        late = await one.register("workers", "w3", worker("w3"))
        assert await late.registered(HANG_S)
        await until(lambda: "w3" in view.items(), "watch is alive")
        for registration in registrations:
            assert await registration.update(worker("w", "b:9"), HANG_S)
        await until(lambda: not view.suspects(), "nobody is in doubt")
        await until(lambda: [w.address for w in view.items().values()].count("b:9") == 2, "updates arrive")
        assert one.state.connected
        assert seen.removed == []
        if empty:
            assert all(registration.leases_lost == 1 for registration in registrations)
    async with client(etcd.address) as raw:
        assert (await raw.list(b"/baton/"))[0] == {}


async def test_etcd_comes_later(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path)
    try:
        async with registry(etcd.address) as one:
            view = one.view("workers", Worker)
            registration = await one.register("workers", "w1", worker("w1"))
            assert not await view.synced(0.1)
            assert not await registration.registered(0.1)
            assert not one.state.connected
            etcd.start()
            assert await registration.registered(HANG_S)
            await until(lambda: "w1" in view.items(), "registered")
    finally:
        etcd.stop()


async def test_paused_etcd_keeps_the_view_and_the_registration(etcd: EtcdServer) -> None:
    async with registry(etcd.address) as one, registry(etcd.address) as other:
        view = other.view("workers", Worker)
        seen = Seen(view)
        registration = await one.register("workers", "w1", worker("w1", "a:1"))
        await until(lambda: "w1" in view.items(), "registered")
        etcd.pause()
        try:
            assert not await registration.update(worker("w1", "a:2"), 0.5)
            await until(lambda: not one.state.connected, "silence is known")
            # The HTTP/2 ping, not a read that never ends, tells the watcher.
            await until(lambda: not other.state.connected, "silence is known to the watcher")
        finally:
            etcd.resume()
        await until(lambda: view.items()["w1"].address == "a:2", "the update arrives after all")
        assert seen.removed == []


async def test_watch_survives_compaction_between_list_and_watch(etcd: EtcdServer) -> None:
    class Racing(EtcdClient):
        """Writes and compacts right after the first list, so that the watch starts before the compacted revision."""

        raced = False

        async def list(self, prefix: bytes) -> tuple[dict[bytes, bytes], int]:
            answer = await super().list(prefix)
            if not self.raced:
                self.raced = True
                for n in range(3):
                    await self.put(prefix + b"k", b"%d" % n)
                kept = await self.get(prefix + b"k")
                assert kept is not None
                await self.compact(kept.mod_revision)
            return answer

    racing = Racing([etcd.address])
    mirror: dict[bytes, bytes | None] = {}
    watch = PrefixWatch(racing, b"/p/", lambda keys: mirror.update(keys), mirror.__setitem__)
    task = asyncio.create_task(watch.run())
    try:
        await until(lambda: mirror.get(b"/p/k") == b"2", "listed again")
        assert watch.restarts == {"compacted": 1}
        await asyncio.sleep(0.1)
        await racing.put(b"/p/k", b"after")
        await until(lambda: mirror.get(b"/p/k") == b"after", "watching again")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await racing.close()


async def test_watch_at_a_compacted_revision_is_refused(etcd: EtcdServer) -> None:
    async with client(etcd.address) as raw:
        for n in range(5):
            await raw.put(b"/p/k", b"%d" % n)
        _, revision = await raw.list(b"/p/")
        await raw.compact(revision)

        async def watch() -> None:
            async for response in raw.watch(b"/p/", 1):
                assert not response.events

        with pytest.raises(EtcdRefused, match="compact"):
            await watch()


async def test_lease_revoked_by_somebody_is_replaced(etcd: EtcdServer) -> None:
    async with registry(etcd.address) as one, client(etcd.address) as raw:
        view = one.view("workers", Worker)
        registration = await one.register("workers", "w1", worker("w1"))
        assert await registration.registered(HANG_S)
        key = await raw.get(WORKERS + b"w1")
        assert key is not None
        await raw.revoke(key.lease)
        assert await raw.get(WORKERS + b"w1") is None
        await until(lambda: registration.leases_lost == 1 and not view.suspects(), "a new lease")
        back = await raw.get(WORKERS + b"w1")
        assert back is not None
        assert back.lease not in (0, key.lease)


@pytest.mark.parametrize("damage", ["deleted", "late-write"])
async def test_damaged_key_is_repaired(etcd: EtcdServer, damage: str) -> None:
    async with registry(etcd.address) as one, client(etcd.address) as raw:
        registration = await one.register("workers", "w1", worker("w1", "a:1"))
        assert await registration.registered(HANG_S)
        right = await raw.get(WORKERS + b"w1")
        assert right is not None
        if damage == "deleted":
            await raw.delete(WORKERS + b"w1")
        else:  # an older write of our own that had timed out
            await raw.put(WORKERS + b"w1", b'{"address":"old:1"}', right.lease)
        async with asyncio.timeout(HANG_S):
            while (now := await raw.get(WORKERS + b"w1")) is None or now.value != right.value:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert now.lease == right.lease
        assert registration.leases_lost == 0


async def test_later_process_of_the_same_id_wins_and_the_earlier_comes_back(etcd: EtcdServer) -> None:
    async with registry(etcd.address) as first, registry(etcd.address) as second, client(etcd.address) as raw:
        earlier = await first.register("workers", "w1", worker("w1", "a:1"))
        assert await earlier.registered(HANG_S)
        later = await second.register("workers", "w1", worker("w1", "b:1"))
        assert await later.registered(HANG_S)
        assert not await earlier.update(worker("w1", "a:2"))
        key = await raw.get(WORKERS + b"w1")
        assert key is not None
        assert b"b:1" in key.value
        await later.withdraw()
        assert await earlier.registered(HANG_S)
        key = await raw.get(WORKERS + b"w1")
        assert key is not None
        assert b"a:2" in key.value


async def test_killed_process_goes_when_its_lease_ends(etcd: EtcdServer) -> None:
    async with registry(etcd.address) as other:
        view = other.view("workers", Worker, answers)
        with registrant(etcd, "w1") as process:
            await until(lambda: "w1" in view.items(), "registered")
            process.kill()
            await until(lambda: not view.items(), "gone")


async def test_process_stopped_for_longer_than_its_lease(etcd: EtcdServer) -> None:
    async with registry(etcd.address) as other, client(etcd.address) as raw:
        view = other.view("workers", Worker, answers)
        seen = Seen(view)
        with registrant(etcd, "w1") as process:
            await until(lambda: "w1" in view.items(), "registered")
            process.send_signal(signal.SIGSTOP)
            await until(lambda: not view.items(), "a process that does not answer goes")
            assert await raw.get(WORKERS + b"w1") is None
            process.send_signal(signal.SIGCONT)
            await until(lambda: "w1" in view.items(), "and comes back by itself")
            assert process.poll() is None
        assert seen.told[0] == seen.told[-1]


async def test_emptied_registry_removes_only_who_does_not_answer(etcd: EtcdServer) -> None:
    """All keys vanish while one process is stopped: it cannot register again, and only the other one answers."""
    async with registry(etcd.address) as other, client(etcd.address) as raw:
        view = other.view("workers", Worker, answers)
        seen = Seen(view)
        with registrant(etcd, "alive"), registrant(etcd, "stopped") as stopped:
            await until(lambda: len(view.items()) == 2, "registered")
            stopped.send_signal(signal.SIGSTOP)
            for id in (b"alive", b"stopped"):
                key = await raw.get(WORKERS + id)
                assert key is not None
                await raw.revoke(key.lease)
            await until(lambda: set(view.items()) == {"alive"}, "the stopped one goes")
            await until(lambda: not view.suspects(), "the other has registered again")
            stopped.send_signal(signal.SIGCONT)
            await until(lambda: len(view.items()) == 2, "both are back")
        assert seen.removed == ["stopped"]


async def test_card_of_the_first_stands_while_anyone_keeps_it(etcd: EtcdServer) -> None:
    card, another = ModelCard(model="m", weights="w"), ModelCard(model="m", weights="x")
    async with registry(etcd.address) as second:
        async with registry(etcd.address) as first:
            assert await first.claim_card(card) == card
            assert await second.claim_card(card) == card
            assert await second.claim_card(card) == card
            assert len(second._tasks) == 1
            async with registry(etcd.address) as third:
                assert await third.claim_card(another) == card
        async with client(etcd.address) as raw, asyncio.timeout(HANG_S):
            # The first has left: the second keeps it.
            while await raw.get(b"/baton/v1/test/models/m") is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    async with registry(etcd.address) as fourth:
        assert await fourth.claim_card(another) == another


async def test_layout_of_the_first_stands_for_its_model_and_engine(etcd: EtcdServer) -> None:
    def layout(dtype: str, engine: str = "torch", model: str = "m") -> StandingLayout:
        return StandingLayout(model=model, engine=engine, layout=kv_pb2.Layout(model="w", dtype=dtype))

    async with registry(etcd.address) as first, registry(etcd.address) as second:
        assert await first.claim_layout(layout("float32")) == layout("float32")
        assert await second.claim_layout(layout("bfloat16")) == layout("float32")
        for other in (layout("bfloat16", engine="vllm"), layout("bfloat16", model="n")):
            assert await second.claim_layout(other) == other


async def test_card_cannot_be_claimed_without_etcd() -> None:
    async with registry(f"127.0.0.1:{free_port()}") as one:
        with pytest.raises(BatonError) as caught:
            await one.claim_card(ModelCard(model="m"), timeout_s=0.5)
        assert caught.value.reason is Reason.REGISTRY_UNAVAILABLE


async def test_nonsense_in_the_registry_is_ignored(etcd: EtcdServer) -> None:
    async with registry(etcd.address) as one, client(etcd.address) as raw:
        await raw.put(WORKERS + b"bad", b"\xff{not json")
        view = one.view("workers", Worker)
        assert await view.synced(HANG_S)
        await raw.put(WORKERS + b"newer", b'{"id":"newer","field_of_tomorrow":{"a":1}}')
        await until(lambda: "newer" in view.items(), "unknown fields are no error")
        await raw.put(WORKERS + b"newer", b"[]")
        await until(lambda: view.invalid == 2, "counted")
        assert view.items() == {"newer": Worker(id="newer")}


async def test_dead_and_deaf_endpoints_are_passed_over(etcd: EtcdServer) -> None:
    with socket.socket() as deaf:  # takes connections, says nothing
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(16)
        endpoints = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{deaf.getsockname()[1]}", etcd.address]
        for _ in range(3):  # the order is random
            async with registry(*endpoints) as one:
                view = one.view("workers", Worker)
                registration = await one.register("workers", "w1", worker("w1"))
                assert await registration.registered(HANG_S)
                await until(lambda view=view: "w1" in view.items(), "seen")


@pytest.mark.parametrize("failure", ["kill", "pause"])
async def test_three_nodes_leader_failover(tmp_path: Path, failure: str) -> None:
    peers = {f"n{n}": f"http://127.0.0.1:{free_port()}" for n in range(3)}
    nodes = {name: EtcdServer(tmp_path, name, peers) for name in peers}
    try:
        for node in nodes.values():
            node.launch()
        for node in nodes.values():
            node.wait_healthy()
        endpoints = [node.address for node in nodes.values()]
        async with registry(*endpoints) as one, registry(*endpoints) as other:
            view = other.view("workers", Worker)
            seen = Seen(view)
            registration = await one.register("workers", "w1", worker("w1", "a:1"))
            await until(lambda: "w1" in view.items(), "registered")
            leader = next(node for node in nodes.values() if is_leader(node))
            getattr(leader, failure)()
            assert await registration.update(worker("w1", "a:2"), HANG_S)
            await until(lambda: view.items()["w1"].address == "a:2", "update through another member")
            assert registration.leases_lost == 0
            assert seen.removed == []
            if failure == "pause":
                leader.resume()
    finally:
        for node in nodes.values():
            node.stop()


async def test_login_and_expired_token(etcd: EtcdServer) -> None:
    gateway(etcd, "auth/user/add", {"name": "root", "password": "secret"})
    gateway(etcd, "auth/role/add", {"name": "root"})
    gateway(etcd, "auth/user/grant", {"user": "root", "role": "root"})
    gateway(etcd, "auth/enable", {})
    async with registry(etcd.address, credentials=Credentials("root", "secret")) as one:
        view = one.view("workers", Worker)
        registration = await one.register("workers", "w1", worker("w1", "a:1"))
        assert await registration.registered(HANG_S)
        etcd.restart()  # etcd's simple tokens end with its process
        assert await registration.update(worker("w1", "a:2"), HANG_S)
        await until(lambda: "w1" in view.items() and view.items()["w1"].address == "a:2", "still logged in")
    wrong = EtcdClient([etcd.address], Credentials("root", "wrong"))
    try:
        with pytest.raises(EtcdRefused):
            await wrong.get(b"k")
    finally:
        await wrong.close()


async def test_waiting_costs_nothing(etcd: EtcdServer) -> None:
    """CPU seconds, not wall-clock: idle and with etcd away, this process must not spin."""
    async with registry(etcd.address) as one:
        view = one.view("workers", Worker)
        await one.register("workers", "w1", worker("w1"))
        await until(lambda: "w1" in view.items(), "registered")

        async def cpu_of(seconds: float) -> float:
            before = time.process_time()
            await asyncio.sleep(seconds)
            return (time.process_time() - before) / seconds

        assert await cpu_of(3) < 0.01
        etcd.kill()
        assert await cpu_of(3) < 0.05


def is_leader(node: EtcdServer) -> bool:
    """Whether this member leads its cluster now."""
    status = gateway(node, "maintenance/status", {})
    header = status["header"]
    assert isinstance(header, dict)
    return status["leader"] == header["member_id"]


def gateway(etcd: EtcdServer, path: str, body: dict[str, str]) -> dict[str, object]:
    """A call through etcd's own JSON gateway: set-up that our client has no need for."""
    request = urllib.request.Request(f"http://{etcd.address}/v3/{path}", json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=HANG_S) as reply:
        answer: dict[str, object] = json.loads(reply.read())
        return answer


def test_proto_numbers_are_those_of_etcd() -> None:
    """A slip of one number would be read as another field: checked against literal bytes of etcd's own wire format."""
    put = etcd_pb2.PutRequest(key=b"k", value=b"v", lease=7)
    assert put.SerializeToString() == b"\x0a\x01k\x12\x01v\x18\x07"
    assert (
        etcd_pb2.WatchCreateRequest(start_revision=3, progress_notify=True).SerializeToString() == b"\x18\x03\x20\x01"
    )
    assert etcd_pb2.WatchResponse.FromString(b"\x5a\x02\x08\x01").events[0].type == etcd_pb2.Event.DELETE
