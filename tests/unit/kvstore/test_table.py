"""The slot table, the eviction order, quotas, sightings and expiry: state machines and small tables."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from services.kvstore.eviction import Arc, Watermarks
from services.kvstore.expiry import Expiry
from services.kvstore.quotas import parse_quotas
from services.kvstore.sightings import Sightings
from services.kvstore.table import Room, SlotEntry, SlotTable
from services.kvstore.tier import Facts

SLOTS = 8
LIMIT = 3
KEYS = st.integers(0, 11).map(lambda n: n.to_bytes(16, "big"))
TENANTS = st.sampled_from(["free", "small"])


class TableMachine(RuleBasedStateMachine):
    """Every slot is in one place; what is read or written is nobody else's; a quota is never passed; when nothing is
    unerased, no slot carries what was cleared, neither found, free, nor being written then."""

    rooms = Bundle("rooms")
    readers = Bundle("readers")

    @initialize(found=st.lists(st.none() | KEYS, max_size=SLOTS))
    def start(self, found: list[bytes | None]) -> None:
        self.table = SlotTable(SLOTS, 10, Watermarks(1.0, 0.75), {"small": LIMIT * 10}, 100)
        self.left = [*found, *[None] * (SLOTS - len(found))]
        self.reading: list[SlotEntry] = []
        self.writing: list[Room] = []
        self.generation = 100
        self.disk = {slot: "free" for slot, key in enumerate(reversed(self.left)) if key}
        """Whose block each slot carries, or may: what a restart would find."""
        self.stale: set[int] = set()
        """Slots that carry what was cleared."""
        self.cleared: set[int] = set()
        """Generations that were being written when they were cleared."""

    @precondition(lambda self: bool(self.left))
    @rule(readable=st.booleans())
    def scan_one(self, readable: bool) -> None:
        key = self.left.pop()
        slot = SLOTS - self.table.unscanned
        before = set(self.table.index)
        entry = SlotEntry(key, slot, 1, Facts("free"), 0) if key and readable else None
        new = entry is not None and key not in before and slot not in self.stale
        assert self.table.scanned(slot, entry, readable) == new

    @rule(target=rooms, tenant=TENANTS)
    def reserve(self, tenant: str) -> object:
        room, gone, _ = self.table.reserve(tenant)
        assert not set(gone) & set(self.table.index)
        assert not set(gone) & {entry.key for entry in self.reading if not entry.condemned}
        if room is None:
            return multiple()
        assert room.generation > self.generation
        self.generation = room.generation
        self.writing.append(room)
        assert room.slot not in self.stale
        self.disk[room.slot] = tenant
        return room

    @rule(room=consumes(rooms), key=KEYS)
    def seal(self, room: Room, key: bytes) -> None:
        self.writing.remove(room)
        before = self.table.index.get(key)
        wanted = room.generation not in self.cleared
        assert self.table.seal(room, key, Facts(room.tenant), 1) == wanted
        assert wanted == (key in self.table.index) if before is None else self.table.index[key] is before

    @rule(room=consumes(rooms))
    def cancel(self, room: Room) -> None:
        self.writing.remove(room)
        self.table.cancel(room)

    @rule(target=readers, key=KEYS)
    def read(self, key: bytes) -> object:
        entry = self.table.read(key)
        assert (entry is not None) == (key in self.table.index)
        if entry is None:
            return multiple()
        self.reading.append(entry)
        return entry

    @rule(entry=consumes(readers))
    def done(self, entry: SlotEntry) -> None:
        self.reading.remove(entry)
        self.table.done(entry)

    @rule(key=KEYS, erase=st.booleans())
    def drop(self, key: bytes, erase: bool) -> None:
        if entry := self.table.index.get(key):
            self.table.drop(key, erase)
            if erase:
                self.stale.add(entry.slot)

    @rule(tenant=TENANTS)
    def clear(self, tenant: str) -> None:
        here = {key for key, entry in self.table.index.items() if entry.facts.tenant == tenant}
        assert set(self.table.clear(tenant, erase=True)) == here
        self.stale |= {slot for slot, whose in self.disk.items() if whose == tenant}
        self.cleared |= {room.generation for room in self.writing if room.tenant == tenant}

    @rule()
    def clear_all(self) -> None:
        """A new era: whatever lies in the slots counts no more, but what is unscanned is told by the scan."""
        if not self.left:
            self.table.clear()
            self.cleared |= {room.generation for room in self.writing}
            self.disk.clear()
            self.stale.clear()

    @rule(count=st.integers(1, 4), done=st.booleans())
    def erase(self, count: int, done: bool) -> None:
        slots = self.table.take_unerased(count)
        assert not {room.slot for room in self.writing} & set(slots)
        assert not {entry.slot for entry in self.reading} & set(slots)
        self.table.erased(slots, done)
        for slot in slots if done else ():
            self.disk.pop(slot, None)
            self.stale.discard(slot)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "table"):
            return
        assert self.table.check() == []
        busy = [e.slot for e in {id(e): e for e in self.reading}.values()] + [r.slot for r in self.writing]
        assert len(set(busy)) == len(busy), "one slot, one use"
        assert self.table.busy == len(busy)
        assert self.table._quotas.used("small") <= LIMIT
        assert not self.stale or self.table.unerased


TableMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTable = TableMachine.TestCase


class ArcMachine(RuleBasedStateMachine):
    """What may be evicted is what came in and is not held; ghosts are bounded."""

    @initialize()
    def start(self) -> None:
        self.arc = Arc(6)
        self.here: set[bytes] = set()
        self.held: set[bytes] = set()

    @rule(key=KEYS)
    def add(self, key: bytes) -> None:
        if key in self.here | self.held:
            return
        while len(self.here) + len(self.held) >= 6:
            victim = self.arc.victim()
            if victim is None:
                return
            self.arc.evict(victim)
            self.here.remove(victim)
        self.arc.add(key)
        self.here.add(key)

    @rule(keys=st.lists(KEYS, unique=True))
    def use(self, keys: list[bytes]) -> None:
        self.arc.use(keys)

    @rule(key=KEYS)
    def hold(self, key: bytes) -> None:
        if key in self.here:
            self.arc.hold(key)
            self.here.remove(key)
            self.held.add(key)

    @rule(used=st.booleans())
    def release_all(self, used: bool) -> None:
        self.arc.release(sorted(self.held), used)
        self.here |= self.held
        self.held = set()

    @rule(key=KEYS)
    def forget(self, key: bytes) -> None:
        self.arc.forget(key)
        self.here.discard(key)
        self.held.discard(key)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "arc"):
            return
        assert len(self.arc) == len(self.here)
        assert all(key in self.arc for key in self.here)
        assert (self.arc.victim() is None) == (not self.here)
        assert self.arc.ghosts <= 12


ArcMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArc = ArcMachine.TestCase


def test_arc_keeps_what_is_used_again_against_a_long_scan() -> None:
    arc = Arc(10)
    names = [n.to_bytes(16, "big") for n in range(1000)]
    for key in names[:5]:
        arc.add(key)
    arc.use(names[:5])
    for key in names[5:]:
        if len(arc) == 10:
            victim = arc.victim()
            assert victim is not None
            arc.evict(victim)
        arc.add(key)
    assert all(key in arc for key in names[:5])


def test_a_restart_counts_the_newer_of_two() -> None:
    table = SlotTable(3, 1, Watermarks(1, 1), {}, 100)
    assert table.scanned(0, SlotEntry(b"k", 0, 5, Facts(), 0))
    assert not table.scanned(1, SlotEntry(b"k", 1, 4, Facts(), 0))
    assert not table.scanned(2, SlotEntry(b"k", 2, 6, Facts(), 0))
    assert table.index[b"k"].slot == 2
    assert table.check() == []


def test_whether_a_slot_is_unerased_can_be_asked_while_the_loop_writes() -> None:
    """The metrics' thread asks; here the loop's next step falls into the middle of its question."""
    table = SlotTable(4, 1, Watermarks(1, 1), {}, 100)
    for slot in range(4):
        table.scanned(slot, None)

    class Interrupting(Room):
        @property
        def erase(self) -> bool:
            table.reserve("")
            return False

        @erase.setter
        def erase(self, value: bool) -> None: ...

    first, _, _ = table.reserve("")
    assert first is not None
    table._writing[first.slot] = Interrupting(first.slot, first.generation, "")
    table.reserve("")
    assert not table.unerased
    assert len(table._writing) == 3


def test_nothing_is_evicted_while_the_scan_runs() -> None:
    table = SlotTable(10, 1, Watermarks(0.5, 0.1), {}, 100)
    for slot in range(5):
        table.scanned(slot, SlotEntry(bytes([slot]), slot, 1, Facts(), 0))
    assert table.reserve("")[:2] == (None, [])
    assert len(table.index) == 5


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=x", "a=-1", "a=0", "a=1,a=2", "a=nan", "a=inf"])
def test_quotas_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"quota|TENANT=GIB"):
        parse_quotas(text)


def test_quotas() -> None:
    assert parse_quotas("") == {}
    assert parse_quotas(" a=1, b=0.5 ,*=2") == {"a": 2**30, "b": 2**29, "*": 2**31}
    assert parse_quotas("x=y=1") == {"x=y": 2**30}


@given(st.lists(st.integers(0, 30), max_size=300))
def test_sightings_are_bounded_and_never_see_too_much(sequence: list[int]) -> None:
    sightings = Sightings(8)
    seen: set[bytes] = set()
    for number in sequence:
        key = number.to_bytes(16, "big")
        again = sightings.sight(key)
        assert not again or key in seen
        assert not again or sightings.twice(key)
        seen.add(key)
        assert len(sightings) <= 16
    now = [0.0]
    fresh = Sightings(8, lambda: now[0])
    assert [fresh.sight(b"a"), fresh.sight(b"b"), fresh.sight(b"a")] == [False, False, True]
    assert not fresh.sight(b"b", apart_s=5.0)
    now[0] = 5.0
    assert fresh.sight(b"b", apart_s=5.0)


def test_expiry_reminds_once() -> None:
    expiry, now = Expiry(), time.time()
    expiry.note(b"never", 0.0)
    expiry.note(b"b", now + 2)
    expiry.note(b"a", now + 1)
    assert expiry.due(now) == set()
    assert expiry.due(now + 1) == {b"a"}
    expiry.note(b"c", now + 2)
    expiry.keep({b"c"})
    assert expiry.due(now + 5) == {b"c"}
    assert len(expiry) == 0
