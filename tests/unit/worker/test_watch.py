"""A router that follows the stream knows exactly the cached keys, whatever it misses."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.engine.port import CacheEvent
from baton.errors import BatonError, Reason
from baton.v1 import worker_pb2 as pb
from baton.worker import watch as module
from baton.worker.metrics import WorkerMetrics
from baton.worker.watch import Watchers

HANG_S = 20.0


class Router:
    """Follows one stream by the rules: numbers without a gap, `cleared` drops everything."""

    def __init__(self, watchers: Watchers) -> None:
        self.keys: set[bytes] = set()
        self.loads: list[pb.Load] = []
        self.seq = 0
        self.resets = 0
        self.open = asyncio.Event()
        self.open.set()
        self.news = asyncio.Event()
        self.task = asyncio.create_task(watchers.serve(self.write))

    async def write(self, update: pb.WorkerUpdate) -> None:
        await self.open.wait()
        if update.HasField("cache"):
            assert update.cache.seq == self.seq + 1
            self.seq += 1
            self.resets += update.cache.cleared
            self.keys = set() if update.cache.cleared else self.keys
            self.keys -= set(update.cache.removed)
            self.keys |= set(update.cache.stored)
        else:
            self.loads.append(update.load)
        self.news.set()

    async def until(self, keys: set[bytes]) -> None:
        async with asyncio.timeout(HANG_S):
            while self.keys != keys:
                self.news.clear()
                await self.news.wait()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def new(load: pb.Load | None = None) -> Watchers:
    return Watchers(3, lambda: pb.Load(running=load.running) if load else pb.Load(), WorkerMetrics(CollectorRegistry()))


KEYS = [bytes([i]) * 16 for i in range(6)]
events = st.builds(
    CacheEvent,
    stored=st.lists(st.sampled_from(KEYS), max_size=3).map(tuple),
    removed=st.lists(st.sampled_from(KEYS), max_size=3).map(tuple),
    cleared=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(events, st.just("join"), st.just("pause"), st.just("go")), max_size=25))
def test_routers_agree_with_the_cache(actions: list[CacheEvent | str]) -> None:
    async def scenario() -> None:
        watchers, routers, model = new(), [], set()
        for action in actions:
            if action == "join":
                routers.append(Router(watchers))
            elif isinstance(action, str):
                for router in routers:
                    (router.open.clear if action == "pause" else router.open.set)()
            else:
                watchers.apply(action)
                model = set() if action.cleared else model
                model = (model - set(action.removed)) | set(action.stored)
            await asyncio.sleep(0)
        for router in routers:
            router.open.set()
            await router.until(model)
            await router.close()
        assert len(watchers) == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_BEHIND", 3)
        patch.setattr(module, "COALESCE_S", 0.0)
        asyncio.run(scenario())


async def test_falling_behind_gives_a_snapshot() -> None:
    watchers = new()
    router = Router(watchers)
    await router.news.wait()
    assert router.resets == 1
    router.open.clear()
    # Some may be taken before the stream stands still: what comes after is more than it keeps all the same.
    keys = [i.to_bytes(16, "little") for i in range(2 * module.MAX_BEHIND + 10)]
    for key in keys:
        watchers.apply(CacheEvent(stored=(key,)))
        await asyncio.sleep(0)
    router.open.set()
    await router.until(set(keys))
    assert router.resets in (2, 3)
    await router.close()


async def test_an_admission_is_told_once_to_each_router() -> None:
    watchers = new(pb.Load(running=2))
    first, second = Router(watchers), Router(watchers)
    await first.until(set())
    await asyncio.sleep(0)
    watchers.admitted("u1")
    async with asyncio.timeout(HANG_S):
        for router in (first, second):
            while not any("u1" in load.admitted for load in router.loads):
                router.news.clear()
                await router.news.wait()
    watchers.changed()
    await asyncio.sleep(0.1)
    for router in (first, second):
        assert sum("u1" in load.admitted for load in router.loads) == 1
        assert router.loads[-1].running == 2
        await router.close()


async def test_it_says_something_as_often_as_it_promises() -> None:
    watchers = new(pb.Load(running=2))
    ticking = asyncio.create_task(watchers.tick())
    router = Router(watchers)
    async with asyncio.timeout(HANG_S):
        while len(router.loads) < 4:
            router.news.clear()
            await router.news.wait()
    assert {(load.running, load.alive_s) for load in router.loads} == {(2, module.ALIVE_S)}
    ticking.cancel()
    await router.close()


async def test_streams_of_a_worker_whose_engine_is_stuck_end() -> None:
    found: list[BatonError] = []

    def check() -> None:
        if found:
            raise found[0]

    watchers = Watchers(3, pb.Load, WorkerMetrics(CollectorRegistry()), check)
    router = Router(watchers)
    await router.news.wait()
    found.append(BatonError(Reason.ENGINE_FAILED, "stuck"))
    watchers.changed()
    with pytest.raises(BatonError):
        await asyncio.wait_for(router.task, HANG_S)
    assert len(watchers) == 0


async def test_streams_are_woken_by_a_change_and_else_each_alive_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOAD_S", 0.02)
    monkeypatch.setattr(module, "ALIVE_S", 0.04)
    looked, woken, enough = 0, [], asyncio.Event()

    def look() -> pb.Load:
        nonlocal looked
        looked += 1
        if looked == 11:
            enough.set()
        return pb.Load(running=int(looked >= 8))

    watchers = Watchers(1, look, WorkerMetrics(CollectorRegistry()))
    monkeypatch.setattr(watchers, "changed", lambda: woken.append(looked))
    ticking = asyncio.create_task(watchers.tick())
    async with asyncio.timeout(HANG_S):
        await enough.wait()
    ticking.cancel()
    assert woken == [1, 3, 5, 7, 8, 10]
