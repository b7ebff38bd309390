"""The choice of a transport, and several of them as one."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.transfer.choose import Endpoint, choose
from baton.transfer.nixl import agent
from baton.transfer.port import Peer
from baton.transfer.tcp.transport import TcpTransport
from baton.transfer.transports import HOST_KEY, Transports, available, endpoint
from tests.unit.transfer.harness import BLOCK, BLOCKS, HANG_S, HAVE_NIXL, NIXL, TCP, Remote

BOTH = ("nixl", "tcp")


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (Endpoint("a", False, BOTH), Endpoint("a", False, BOTH), "nixl"),
        (Endpoint("a", False, BOTH), Endpoint("b", False, BOTH), "tcp"),
        (Endpoint("a", True, BOTH), Endpoint("b", False, BOTH), "tcp"),
        (Endpoint("a", False, BOTH), Endpoint("b", True, BOTH), "tcp"),
        (Endpoint("a", True, BOTH), Endpoint("b", True, BOTH), "nixl"),
        (Endpoint("a", False, ("tcp",)), Endpoint("a", False, BOTH), "tcp"),
        (Endpoint("a", True, BOTH), Endpoint("b", True, ("tcp",)), "tcp"),
        (Endpoint("a", False, ("nixl",)), Endpoint("b", False, BOTH), "nixl"),
        (Endpoint("a", False, BOTH), Endpoint("a", False, (*BOTH, "of-tomorrow")), "nixl"),
    ],
)
def test_choice(ours: Endpoint, theirs: Endpoint, expected: str) -> None:
    choice = choose(ours, theirs)
    assert choice.transport == expected
    assert choice.why


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(BatonError) as failure:
        choose(Endpoint("a", True, ("nixl",)), Endpoint("a", True, ("tcp",)))
    assert failure.value.reason is Reason.KV_TRANSFER_FAILED


def test_the_choice_is_symmetric() -> None:
    """Both ends would choose alike: it depends on what they share, not on who asks."""
    ends = [
        Endpoint(host, rdma, have)
        for host, rdma, have in itertools.product("ab", (False, True), (BOTH, ("tcp",), ("nixl",)))
    ]
    for one, two in itertools.product(ends, ends):
        if set(one.transports) & set(two.transports):
            assert choose(one, two).transport == choose(two, one).transport


def test_metadata_that_says_nothing_is_on_no_known_host() -> None:
    assert endpoint({"tcp": b"x"}) == Endpoint("unknown", False, frozenset({"tcp"}))
    assert endpoint({HOST_KEY: b"\xff\xfe 1"}).rdma


@pytest_asyncio.fixture
async def remotes() -> AsyncIterator[dict[str, Remote]]:
    started = {"tcp": await Remote.start(TCP, "over-tcp"), "nixl": await Remote.start(NIXL, "over-nixl")}
    yield started
    for remote in started.values():
        await remote.kill()


def placed(remote: Remote, where: Transports, **more: bytes) -> Peer:
    """The remote as if it were on our host and offered `more` beside what it serves."""
    metadata = {**remote.peer.metadata, **more, HOST_KEY: where.metadata()[HOST_KEY]}
    return Peer(remote.owner, remote.epoch, remote.peer.arena_bytes, metadata)


@pytest.mark.nixl
@pytest.mark.skipif(not HAVE_NIXL, reason="no NIXL library here")
async def test_a_batch_goes_by_each_owners_transport(remotes: dict[str, Remote]) -> None:
    ours = Transports(available())
    arena = Arena.create(BLOCK * BLOCKS)
    await ours.start(arena, "me", 1, slot_bytes=BLOCK)
    try:
        assert set(ours.metadata()) == {"nixl", "tcp", HOST_KEY}
        deadline = time.monotonic() + HANG_S
        for name, remote in remotes.items():
            choice = await ours.pair(placed(remote, ours), deadline)
            assert choice.transport == name
            assert ours.choice(remote.owner) == choice
        handles = [remotes[name].handle(i) for i, name in enumerate(("tcp", "nixl", "nixl", "tcp"))]
        handles.insert(2, remotes["tcp"].handle(9, owner="nobody"))
        report = await ours.read(handles, [i * BLOCK for i in range(5)], deadline)
        assert [b.reason for b in report.blocks] == [None, None, Reason.KV_STALE_EPOCH, None, None]
        assert [b.handle for b in report.blocks] == handles
        assert report.bytes == 4 * BLOCK
        assert report.verified_prefix() == 2
        assert not ours.quarantined()
        with ours.lease():
            pass
    finally:
        await ours.close()


@pytest.mark.nixl
@pytest.mark.skipif(not HAVE_NIXL, reason="no NIXL library here")
async def test_a_failed_nixl_pairing_falls_back_to_tcp(remotes: dict[str, Remote]) -> None:
    ours = Transports(available())
    await ours.start(Arena.create(BLOCK * BLOCKS), "me", 1)
    try:
        peer = placed(remotes["tcp"], ours, nixl=b"what an agent of another release might say")
        choice = await ours.pair(peer, time.monotonic() + HANG_S)
        assert choice.transport == "tcp"
        assert "nixl" in choice.why
        report = await ours.read([remotes["tcp"].handle(0)], [0], time.monotonic() + HANG_S)
        assert report.verified_prefix() == 1
    finally:
        await ours.close()


async def test_without_the_library_there_is_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "PACKAGES", ("no_nixl_of_that_name",))
    ours = Transports(available())
    await ours.start(Arena.create(4096), "me", 1)
    try:
        assert set(ours.metadata()) == {"tcp", HOST_KEY}
        assert "no_nixl_of_that_name" in ours.missing["nixl"]
    finally:
        await ours.close()


async def test_no_transport_at_all_is_an_error() -> None:
    with pytest.raises(BatonError) as failure:
        await Transports([TcpTransport("203.0.113.1")]).start(Arena.create(4096), "me", 1)
    assert failure.value.reason is Reason.KV_TRANSFER_FAILED
