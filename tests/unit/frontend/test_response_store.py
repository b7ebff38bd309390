"""What is kept of responses: never more than it may be, whatever comes and goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.errors import BatonError
from services.frontend.responses.run import Log
from services.frontend.responses.store import OVERHEAD, Kept, ResponseStore, listed

COUNT, SIZE, KEEP_S = 5, 3000, 100.0


def make_store(clock: Any = lambda: 0.0) -> tuple[ResponseStore, CollectorRegistry]:
    registry = CollectorRegistry()
    evicted = Counter("evicted", "", ["why"], registry=registry)
    held = Gauge("held", "", registry=registry)
    return ResponseStore(evicted, held, count=COUNT, size=SIZE, keep_s=KEEP_S, clock=clock), registry


def kept(id: str, size: int = 10, earlier: tuple[bytes, ...] = (), status: str = "completed") -> Kept:
    return Kept(id, status, b"r" * size, b'{"id":"%s"}' % id.encode(), b'{"o":1}', earlier)


def known(store: ResponseStore, id: str) -> bool:
    try:
        store.get(id, "")
    except BatonError:
        return False
    return True


class Machine(RuleBasedStateMachine):
    """Puts, turns that go on, deletes and time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store, self.registry = make_store(lambda: self.now)
        self.ids: list[str] = []
        self.made = 0

    @rule(size=st.integers(0, 2 * SIZE), running=st.booleans(), goes_on=st.integers(0, 10))
    def put(self, size: int, running: bool, goes_on: int) -> None:
        earlier: tuple[bytes, ...] = ()
        if self.ids and known(self.store, self.ids[goes_on % len(self.ids)]):
            earlier = self.store.get(self.ids[goes_on % len(self.ids)], "").conversation
        self.made += 1
        self.ids.append(f"r{self.made}")
        if running:
            self.store.put(kept(self.ids[-1], 10, earlier, "in_progress"))
            assert known(self.store, self.ids[-1])
        self.store.put(kept(self.ids[-1], size, earlier))

    @rule(which=st.integers(0, 50))
    def delete(self, which: int) -> None:
        if self.ids:
            self.store.delete(self.ids[which % len(self.ids)])
            assert not known(self.store, self.ids[which % len(self.ids)])

    @rule(seconds=st.floats(0, KEEP_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def bounded(self) -> None:
        known(self.store, "nobody")
        assert self.store.check_integrity() == []
        assert len(self.store) <= COUNT
        assert self.store.bytes <= SIZE


TestStore = Machine.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_why_they_go() -> None:
    now = 0.0
    store, registry = make_store(lambda: now)
    for n in range(COUNT + 1):
        store.put(kept(f"r{n}"))
    assert not known(store, "r0")
    store.put(kept("large", SIZE - 600))
    assert known(store, "large")
    assert not known(store, "r1")
    store.put(kept("larger", SIZE))
    assert not known(store, "larger")
    store.put(kept("old"))
    now = 2 * KEEP_S
    assert not known(store, "old")
    why = {w: registry.get_sample_value("evicted_total", {"why": w}) for w in ("count", "bytes", "age")}
    assert why["count"] == 2.0
    assert all(why.values())
    assert (len(store), store.bytes, registry.get_sample_value("held")) == (0, 0, 0.0)


def test_turns_share_what_they_have_in_common() -> None:
    store, _ = make_store()
    first = kept("a", 1000)
    store.put(first)
    second = kept("b", 10, first.conversation)
    store.put(second)
    alone = store.bytes
    store.delete("a")
    assert alone - store.bytes == 1000 + OVERHEAD * len(first.parts)
    assert second.input == b'[{"id":"a"},{"o":1},{"id":"b"}]'
    assert listed(second.conversation) == b'[{"id":"a"},{"o":1},{"id":"b"},{"o":1}]'


def test_what_runs_stays() -> None:
    store, _ = make_store()
    for n in range(2 * COUNT):
        store.put(kept(f"r{n}", status="in_progress"))
    assert len(store) == 2 * COUNT
    for n in range(2 * COUNT):
        store.put(kept(f"r{n}"))
    assert len(store) == COUNT


# ---- the events of a run


async def follow(log: Log, after: int = -1) -> bytes:
    return b"".join([part async for part in log.follow(after)])


async def test_events_are_followed_while_they_come_and_afterwards() -> None:
    log = Log()
    early = asyncio.create_task(follow(log))
    for n in range(100):
        log.add(b"event: %d\n\n" % n)
        if n % 10 == 0:
            await asyncio.sleep(0)
    middle = asyncio.create_task(follow(log, 41))
    await asyncio.sleep(0)
    log.add(b"event: 100\n\nevent: 101\n\n")
    log.end()
    whole = b"".join(b"event: %d\n\n" % n for n in range(102))
    assert await early == await follow(log) == log.sealed == whole
    assert await middle == whole[whole.index(b"event: 42\n") :]
    assert await follow(log, 101) == await follow(log, 5000) == b""


async def test_what_is_not_kept_is_refused_and_never_skipped() -> None:
    log = Log(limit=1000)
    for n in range(500):
        log.add(b"event: %d\n\n" % n)
    log.end()
    assert len(log.sealed) <= 1000
    with pytest.raises(BatonError) as caught:
        await follow(log, 3)
    assert caught.value.param == "starting_after"
    assert (await follow(log, 497)).startswith(b"event: 498\n")
