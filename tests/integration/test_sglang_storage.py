"""SGLang's storage interface, as its wheel has it, on a real store: each rank a process with SGLang's own host pool."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import kvstore_pb2_grpc, worker_pb2
from tests.etcd import EtcdServer
from tests.sglang_rank import PAGES, Rank, hashes, page_bytes, refusals
from tests.worker_process import WorkerProcess

pytestmark = pytest.mark.integration

HANG_S = 60.0
ALL = list(range(PAGES))


class Store:
    """One kvstore that can be broken and mended."""

    def __init__(self, directory: Path, etcd: str) -> None:
        self._directory, self._etcd = directory, etcd
        self.start()

    def start(self) -> None:
        flags = {"etcd": self._etcd, "capacity_gib": 0.02}
        self.process = WorkerProcess("kvstore", "kvstore-1", self._directory, **flags).wait_ready()

    def flip(self, content: bytes) -> None:
        """Change one bit in the middle of the block that has this content."""
        folder = Path(f"/proc/{self.process.process.pid}/fd")
        arena = next(fd for fd in folder.iterdir() if "baton-kvstore" in os.readlink(fd))
        with arena.open("r+b", buffering=0) as memory:
            held = memory.read()
            at = held.index(content) + len(content) // 2
            os.pwrite(memory.fileno(), bytes([held[at] ^ 1]), at)

    def settle(self) -> None:
        """Wait until every slot, pin and call is accounted for."""
        with grpc.insecure_channel(self.process.address) as channel:
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            end = time.monotonic() + HANG_S
            while findings := stub.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), timeout=HANG_S).findings:
                assert time.monotonic() < end, list(findings)
                time.sleep(0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def etcd(folder: Path) -> Iterator[str]:
    with EtcdServer(folder) as server:
        yield server.address


@pytest.fixture(scope="module")
def store(folder: Path, etcd: str) -> Iterator[Store]:
    store = Store(folder, etcd)
    try:
        yield store
        store.settle()
    finally:
        store.process.kill()


@pytest.fixture(scope="module")
def start(folder: Path, etcd: str) -> Iterator[Callable[..., Rank]]:
    """Starts ranks, one for each set of flags; those that are asked for again are the same process."""
    ranks: dict[str, Rank] = {}

    def get(name: str, **flags: Any) -> Rank:
        if name not in ranks:
            ranks[name] = Rank(folder, name, etcd, **flags)
        return ranks[name]

    yield get
    for rank in ranks.values():
        rank.stop()


@pytest.fixture(params=["nixl,tcp", "tcp"])
def rank(request: pytest.FixtureRequest, start: Callable[..., Rank], store: Store) -> Iterator[Rank]:
    """A rank with little memory to read through: a batch comes in pieces."""
    slots = {"bounce_mib": 1}
    rank = start(f"rank-{request.param}", page_size=256, baton={"transports": request.param, **slots})
    rank.wait_store()
    rank.clear()
    rank.wipe()
    yield rank
    assert settled(rank)


def settled(rank: Rank) -> bool:
    """Whether every bounce slot comes back."""
    end = time.monotonic() + HANG_S
    while True:
        _, free, slots = rank.identity()
        if free == slots or time.monotonic() > end:
            return bool(free == slots)
        time.sleep(0.05)


def put(rank: Rank, names: list[str]) -> None:
    """Store these pages and forget them here."""
    pages = ALL[: len(names)]
    rank.fill(names, pages)
    assert rank.set(names, pages) == [True] * len(names)
    rank.wipe()


def test_pages_come_back_as_they_went(rank: Rank) -> None:
    names = hashes(f"round {time.monotonic()}", PAGES)
    assert rank.exists(names) == 0
    assert rank.get(names, ALL) == [False] * PAGES
    put(rank, names)
    assert rank.exists(names) == PAGES
    elsewhere = ALL[::-1]
    assert rank.get(names, elsewhere) == [True] * PAGES
    assert rank.right(names, elsewhere) == [True] * PAGES
    assert rank.counted("loaded_pages") >= PAGES
    assert rank.counted("missed_pages", "NOT_FOUND") >= PAGES


def test_a_part_of_a_prefix(rank: Rank) -> None:
    names = hashes(f"part {time.monotonic()}", 8)
    put(rank, names[:3])
    put(rank, names[5:])
    assert rank.exists(names) == 3
    assert rank.exists(names[4:]) == 0
    assert rank.get(names, ALL[:8]) == [True] * 3 + [False] * 5
    assert rank.right(names[:3], ALL[:3]) == [True] * 3
    assert rank.untouched(ALL[3:]), "what was not loaded was not written to"


def test_a_byte_that_changed_in_the_store_is_a_miss(rank: Rank, store: Store) -> None:
    names = hashes(f"flipped {time.monotonic()}", 4)
    put(rank, names)
    before = rank.counted("missed_pages", "KV_CHECKSUM_MISMATCH")
    store.flip(bytes_of(names[2]))
    assert rank.get(names, ALL[:4]) == [True, True, False, False]
    assert rank.right(names[:2], ALL[:2]) == [True, True]
    assert rank.untouched(ALL[2:]), "a page's bytes are verified before they are where SGLang could use them"
    assert rank.counted("missed_pages", "KV_CHECKSUM_MISMATCH") == before + 2


def bytes_of(name: str) -> bytes:
    """What `Rank.fill` puts into a page of 256 tokens."""
    raw = bytearray(random.Random(name).randbytes(page_bytes(256)))
    raw[1::2] = bytes(b & 0x3F for b in raw[1::2])
    return bytes(raw)


def test_v2_is_v1_for_the_kv_pool_and_nothing_for_others(rank: Rank) -> None:
    names = hashes(f"v2 {time.monotonic()}", 4)
    rank.fill(names, ALL[:4])
    assert rank.move_v2("set", names, ALL[:4]) == {"kv": [True] * 4}
    rank.wipe()
    assert rank.exists_v2(names) == [4, {}]
    assert rank.move_v2("get", names, ALL[:4]) == {"kv": [True] * 4}
    assert rank.right(names, ALL[:4]) == [True] * 4
    assert rank.exists_v2(names, "mamba") == [0, {"mamba": 0}]
    assert rank.move_v2("get", names, ALL[:4], "mamba") == {"mamba": [False] * 4}
    assert rank.move_v2("set", names, ALL[:4], "mamba") == {"mamba": [False] * 4}


def test_flat_pages(rank: Rank) -> None:
    names = hashes(f"flat {time.monotonic()}", 6)
    assert rank.flat(names) == [True, [True] * 6, True, True, True]
    assert rank.get(names, ALL[:6]) == [True] * 6, "a flat page is the page"
    assert rank.right(names, ALL[:6]) == [True] * 6


def test_what_cannot_be_is_a_miss_and_no_error(rank: Rank) -> None:
    names = hashes("wrong", 2)
    assert rank.get(names, [0]) == [False, False], "fewer pages than keys"
    assert rank.set(names, [0]) == [False, False]
    assert rank.get([""], [0]) == [False]
    assert rank.exists([]) == 0
    assert rank.get([], []) == []
    assert rank.get(names[:1], [PAGES + 3]) == [False], "a page outside the pool"
    assert rank.counted("missed_pages", "INTERNAL") >= 1


@pytest.mark.parametrize("layout", ["page_first_direct", "page_head"])
def test_other_page_first_layouts(layout: str, start: Callable[..., Rank], store: Store) -> None:
    rank = start(layout, page_size=256, layout=layout)
    plain = start("rank-tcp", page_size=256, baton={"transports": "tcp", "bounce_mib": 1})
    plain.wait_store()
    plain.clear()
    rank.wait_store()
    assert rank.identity()[0] != plain.identity()[0]
    names = hashes(layout, 5)
    put(rank, names)
    assert plain.exists(names) == 0, "other bytes in the same pages"
    assert rank.get(names, ALL[:5]) == [True] * 5
    assert rank.right(names, ALL[:5]) == [True] * 5
    rank.clear()
    assert rank.exists(names) == 0


def test_two_ranks_and_two_tenants_share_nothing(start: Callable[..., Rank], store: Store) -> None:
    flags: dict[str, Any] = {"page_size": 256, "tp_size": 2}
    first, second = start("tp-0", tp_rank=0, **flags), start("tp-1", tp_rank=1, **flags)
    other = start("tenant", tp_rank=0, **flags, baton={"tenant": "other"})
    twin = start("twin", tp_rank=0, **flags)
    ranks = (first, second, other, twin)
    start("rank-tcp", page_size=256, baton={"transports": "tcp", "bounce_mib": 1}).clear()
    for rank in ranks:
        rank.wait_store()
    names = hashes("shared", 4)
    assert len({tuple(rank.keys(names)) for rank in ranks}) == 3
    put(first, names)
    assert [rank.exists(names) for rank in ranks] == [4, 0, 0, 4]
    put(second, names)
    put(other, names[:2])
    assert [rank.exists(names) for rank in ranks] == [4, 4, 2, 4]
    assert twin.get(names, ALL[:4]) == [True] * 4
    assert twin.right(names, ALL[:4]) == [True] * 4
    other.clear()
    assert [rank.exists(names) for rank in ranks] == [4, 4, 0, 4], "a tenant clears its own"
    first.clear()
    assert [rank.exists(names) for rank in ranks] == [0, 0, 0, 0]


def test_a_store_that_dies_while_it_is_read(start: Callable[..., Rank], store: Store) -> None:
    """A miss, in bounded time; then it works again with the one that comes back, which has another epoch."""
    rank = start("rank-tcp", page_size=256, baton={"transports": "tcp", "bounce_mib": 1})
    rank.wait_store()
    names = hashes("dies", PAGES)
    put(rank, names)
    store.process.signal(signal.SIGSTOP)
    rank.begin("get", names, ALL)
    time.sleep(0.3)
    store.process.kill()
    loaded = rank.finish()
    assert loaded == [False] * PAGES
    assert rank.untouched(ALL)
    rank.fill(names, ALL)
    assert rank.set(names, ALL) == [False] * PAGES
    assert rank.exists(names) == 0
    rank.wipe()
    store.start()
    rank.wait_store()
    assert rank.exists(names) == 0
    put(rank, names)
    assert rank.get(names, ALL) == [True] * PAGES
    assert rank.right(names, ALL) == [True] * PAGES
    assert settled(rank)


def test_a_store_killed_at_any_moment_of_a_read(start: Callable[..., Rank], store: Store) -> None:
    """What is said to be there is right, whatever was under way."""
    rank = start("rank-nixl,tcp", page_size=256, baton={"transports": "nixl,tcp", "bounce_mib": 1})
    rank.wait_store()
    names = hashes("killed", PAGES)
    put(rank, names)
    rank.begin("get", names, ALL)
    time.sleep(0.002)
    store.process.kill()
    loaded = rank.finish()
    good = loaded.count(True)
    assert loaded == [True] * good + [False] * (PAGES - good)
    assert rank.right(names[:good], ALL[:good]) == [True] * good
    assert rank.untouched(ALL[good:])
    store.start()
    rank.wait_store()
    assert settled(rank)


def test_a_store_that_hangs_costs_its_patience_once(start: Callable[..., Rank], store: Store) -> None:
    rank = start("rank-nixl,tcp", page_size=256, baton={"transports": "nixl,tcp", "bounce_mib": 1})
    rank.wait_store()
    names = hashes("hangs", 4)
    put(rank, names)
    store.process.signal(signal.SIGSTOP)
    try:
        assert rank.get(names, ALL[:4]) == [False] * 4
        before = rank.counted("missed_pages", "STORE_UNAVAILABLE")
        assert rank.get(names, ALL[:4]) == [False] * 4
        assert rank.counted("missed_pages", "STORE_UNAVAILABLE") == before + 4, "it rests"
    finally:
        store.process.signal(signal.SIGCONT)
    rank.wait_store()
    assert rank.get(names, ALL[:4]) == [True] * 4
    assert rank.right(names, ALL[:4]) == [True] * 4


def test_without_a_registry_everything_is_a_miss_until_it_comes(folder: Path) -> None:
    """SGLang starts before Baton does."""
    (folder / "late").mkdir()
    late = EtcdServer(folder / "late")
    rank = Rank(folder, "early", late.address)
    names = hashes("early", 2)
    try:
        rank.fill(names, [0, 1])
        assert rank.set(names, [0, 1]) == [False, False]
        assert rank.get(names, [2, 3]) == [False, False]
        assert rank.exists(names) == 0
        assert rank.counted("dropped_pages", "STORE_UNAVAILABLE") == 2
        with late:
            store = Store(folder / "late", late.address)
            try:
                rank.wait_store()
                assert rank.set(names, [0, 1]) == [True, True]
                assert rank.get(names, [2, 3]) == [True, True]
                assert rank.right(names, [2, 3]) == [True, True]
                store.settle()
            finally:
                store.process.kill()
        rank.close()
        assert rank.get(names, [2, 3]) == [False, False]
        assert rank.exists(names) == 0
    finally:
        rank.stop()


def test_what_is_not_taken_is_refused_as_sglang_starts(etcd: str) -> None:
    expected: list[tuple[dict[str, Any], str]] = [
        ({"mla": True}, "MLA"),
        ({"page_size": 16}, "--page-size must be a multiple of 32, not 16"),
        ({"layout": "layer_first"}, "--hicache-mem-layout must be one of page_first"),
        ({"dtype": "uint8"}, "the pool holds uint8"),
        ({"pools": ["mamba"]}, "pool mamba"),
        ({"baton": {"weights": ""}}, "baton.weights is missing"),
        ({"baton": {"tennant": "x"}}, "baton.tennant is not known"),
        ({"baton": {"transports": "rdma"}}, "no transport can be used here"),
        ({"extra": {"interface_v1": 0}}, "interface_v1"),
        ({}, ""),
    ]
    said = refusals(etcd, *(flags for flags, _ in expected))
    for (flags, words), text in zip(expected, said, strict=True):
        assert (words in text) if words else not text, (flags, text)
