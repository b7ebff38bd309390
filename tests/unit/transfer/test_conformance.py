"""What every transport must do. Each test runs over tcp, over NIXL (same host) and over NIXL forced onto TCP.

The peer is a real process. Deadlines here are either far away (HANG_S: must not be reached) or short and meant to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Segment
from baton.transfer.nixl.agent import Agent
from baton.transfer.port import ReadReport, Transport
from baton.transfer.tcp import client
from tests.unit.transfer.conftest import Starter
from tests.unit.transfer.harness import BLOCK, BLOCKS, HANG_S, WAYS, Remote, Way, out_of_quarantine

pytestmark = pytest.mark.parametrize("way", WAYS)

SLOTS = [block * BLOCK for block in range(BLOCKS)]
FILLER = b"\xa5" * BLOCK


def soon() -> float:
    """A deadline that must not be reached."""
    return time.monotonic() + HANG_S


def short() -> float:
    """A deadline that is meant to pass."""
    return time.monotonic() + 0.3


def reasons(report: ReadReport) -> list[Reason | None]:
    return [block.reason for block in report.blocks]


def assert_filler(arena: Arena, slots: list[int]) -> None:
    for slot in slots:
        assert bytes(arena.view(slot, BLOCK)) == FILLER


# --- it reads -------------------------------------------------------------------------------------------------------


async def test_reads_what_the_peer_has(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    order = random.Random(3).sample(range(BLOCKS), BLOCKS)
    report = await reader.read([remote.handle(b) for b in order], SLOTS, soon())
    assert report.verified_prefix() == BLOCKS
    assert report.bytes == BLOCKS * BLOCK
    assert not report.late
    assert report.settled is None
    for slot, block in zip(SLOTS, order, strict=True):
        assert bytes(arena.view(slot, BLOCK)) == remote.content(block)


async def test_gathers_segments_in_order(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    quarter = BLOCK // 4
    segments = tuple(Segment(0, 5 * BLOCK + i * quarter, quarter) for i in (2, 0, 3, 1))
    report = await reader.read([remote.handle(5, segments=segments)], [BLOCK], soon(), verify=False)
    assert reasons(report) == [None]
    whole = remote.content(5)
    assert bytes(arena.view(BLOCK, BLOCK)) == b"".join(whole[i * quarter : (i + 1) * quarter] for i in (2, 0, 3, 1))
    assert_filler(arena, [0, *SLOTS[2:]])


async def test_nothing_asked_nothing_done(remote: Remote, reader: Transport) -> None:
    await reader.pair(remote.peer, soon())
    report = await reader.read([], [], soon())
    assert (report.blocks, report.bytes, report.verified_prefix()) == ([], 0, 0)


async def test_sixteen_reads_at_once(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    reports = await asyncio.gather(
        *(reader.read([remote.handle(b)], [SLOTS[b]], soon()) for b in range(16)),
    )
    assert [reasons(report) for report in reports] == [[None]] * 16
    for block in range(16):
        assert bytes(arena.view(SLOTS[block], BLOCK)) == remote.content(block)


# --- pairing --------------------------------------------------------------------------------------------------------


async def test_sixteen_pairs_are_one_handshake(
    remote: Remote, reader: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    handshakes = []
    add, connect = Agent.add, client.connect

    def counted_add(self: Agent, metadata: bytes) -> str:
        handshakes.append("nixl")
        return add(self, metadata)

    async def counted_connect(peer: object) -> object:
        handshakes.append("tcp")
        return await connect(peer)  # type: ignore[arg-type]

    monkeypatch.setattr(Agent, "add", counted_add)
    monkeypatch.setattr(client, "connect", counted_connect)
    await asyncio.gather(*(reader.pair(remote.peer, soon()) for _ in range(16)))
    await reader.pair(remote.peer, soon())
    assert len(handshakes) == 1


async def test_pairing_has_a_deadline(remote: Remote, reader: Transport, way: Way) -> None:
    remote.stop()
    with pytest.raises(BatonError) as failure:
        await reader.pair(remote.peer, short())
    assert failure.value.reason is Reason.KV_TRANSFER_TIMEOUT
    remote.resume()
    await reader.pair(remote.peer, soon())  # the same handshake goes on, or a new one: it works in the end
    assert (await reader.read(remote.handles(2), SLOTS[:2], soon())).verified_prefix() == 2


async def test_one_waiter_gives_up_the_others_get_their_pairing(remote: Remote, reader: Transport) -> None:
    remote.stop()
    gives_up = asyncio.create_task(reader.pair(remote.peer, soon()))
    stays = asyncio.create_task(reader.pair(remote.peer, soon()))
    await asyncio.sleep(0.05)
    gives_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gives_up
    remote.resume()
    await stays


async def test_pairing_with_a_dead_peer_fails(remote: Remote, reader: Transport) -> None:
    await remote.kill()
    with pytest.raises(BatonError) as failure:
        await reader.pair(remote.peer, time.monotonic() + 3.0)
    assert failure.value.reason in (Reason.KV_TRANSFER_FAILED, Reason.KV_TRANSFER_TIMEOUT)


async def test_pairing_with_nonsense_fails(remote: Remote, reader: Transport, way: Way) -> None:
    for metadata in ({}, {way.transport: b"nonsense" * 20}, {way.transport: b""}):
        with pytest.raises(BatonError) as failure:
            await reader.pair(type(remote.peer)("other", 5, BLOCK, metadata), soon())
        assert failure.value.reason is Reason.KV_TRANSFER_FAILED
    await reader.pair(remote.peer, soon())  # and none of it hurts the next one
    assert (await reader.read(remote.handles(1), [0], soon())).verified_prefix() == 1


async def test_metadata_of_another_process_is_refused(start_remote: Starter, reader: Transport) -> None:
    one, two = await asyncio.gather(start_remote("one"), start_remote("two"))
    await reader.pair(one.peer, soon())
    masked = type(one.peer)("two", two.epoch, two.peer.arena_bytes, one.peer.metadata)
    with pytest.raises(BatonError) as failure:
        await reader.pair(masked, soon())
    assert failure.value.reason in (Reason.KV_TRANSFER_FAILED, Reason.KV_STALE_EPOCH)
    assert (await reader.read(one.handles(1), [0], soon())).verified_prefix() == 1
    await reader.pair(two.peer, soon())
    assert (await reader.read(two.handles(1), [0], soon())).verified_prefix() == 1


# --- epochs ---------------------------------------------------------------------------------------------------------


async def test_stale_epoch_is_refused(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    stale = remote.handle(0, epoch=remote.epoch ^ 1)
    report = await reader.read([stale, remote.handle(1)], SLOTS[:2], soon())
    assert reasons(report) == [Reason.KV_STALE_EPOCH, None]
    assert report.verified_prefix() == 0
    assert_filler(arena, SLOTS[:1])


async def test_unpaired_owner_is_refused(remote: Remote, reader: Transport, arena: Arena) -> None:
    report = await reader.read(remote.handles(2), SLOTS[:2], soon())
    assert reasons(report) == [Reason.KV_STALE_EPOCH] * 2
    assert_filler(arena, SLOTS)


async def test_restarted_peer_is_paired_in_its_new_epoch(
    start_remote: Starter, reader: Transport, arena: Arena
) -> None:
    before = await start_remote("p")
    await reader.pair(before.peer, soon())
    assert (await reader.read(before.handles(1), [0], soon())).verified_prefix() == 1
    await before.kill()
    after = await start_remote("p")
    await reader.pair(after.peer, soon())
    report = await reader.read([before.handle(1), after.handle(1)], SLOTS[1:3], soon())
    assert reasons(report) == [Reason.KV_STALE_EPOCH, None]
    assert_filler(arena, SLOTS[1:2])
    assert bytes(arena.view(SLOTS[2], BLOCK)) == after.content(1)


async def test_read_after_the_peer_died_fails_and_pairing_again_heals(start_remote: Starter, reader: Transport) -> None:
    before = await start_remote("p")
    await reader.pair(before.peer, soon())
    await before.kill()
    for _ in range(2):
        report = await reader.read(before.handles(3), SLOTS[:3], soon())
        assert reasons(report) == [Reason.KV_TRANSFER_FAILED] * 3
    after = await start_remote("p")
    await reader.pair(after.peer, soon())
    assert (await reader.read(after.handles(3), SLOTS[:3], soon())).verified_prefix() == 3


# --- forged handles -------------------------------------------------------------------------------------------------


async def test_forged_handles_are_refused_before_a_byte_moves(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    end = remote.peer.arena_bytes
    forged = {
        "outside the arena": {"segments": (Segment(0, end - BLOCK + 1, BLOCK),)},
        "far outside": {"segments": (Segment(0, 1 << 62, BLOCK),)},
        "before the arena": {"segments": (Segment(0, -BLOCK, BLOCK),)},
        "longer than the slot": {"segments": (Segment(0, 0, BLOCK + 1),)},
        "longer by parts": {"segments": (Segment(0, 0, BLOCK), Segment(0, BLOCK, 1))},
        "a second segment outside": {"segments": (Segment(0, 0, 16), Segment(0, end, 16))},
        "no segments": {"segments": ()},
        "empty segment": {"segments": (Segment(0, 0, 0),)},
        "negative length": {"segments": (Segment(0, 64, -64),)},
        "unknown region": {"segments": (Segment(1, 0, BLOCK),)},
        "crumbs": {"segments": tuple(Segment(0, 0, 1) for _ in range(5000))},
        "unknown checksum": {"algorithm": "crc-of-tomorrow"},
        "negative generation": {"generation": -1},
        "huge generation": {"generation": 1 << 64},
    }
    for name, changes in forged.items():
        report = await reader.read([remote.handle(0, **changes), remote.handle(1)], [0, SLOTS[20]], soon())
        assert reasons(report) == [Reason.KV_BAD_HANDLE, None], name
        assert_filler(arena, SLOTS[:20])
    unknown = await reader.read([remote.handle(0, owner="nobody")], [0], soon())
    assert reasons(unknown) == [Reason.KV_STALE_EPOCH]


async def test_bytes_under_another_name_do_not_verify(remote: Remote, reader: Transport) -> None:
    await reader.pair(remote.peer, soon())
    forged = [
        remote.handle(0, generation=77),
        remote.handle(1, key=b"another key 1234"),
        remote.handle(2, segments=(Segment(0, 2 * BLOCK, BLOCK - 8),)),
        remote.handle(3, segments=(Segment(0, 4 * BLOCK, BLOCK),)),
        remote.handle(4, checksum=0),
    ]
    report = await reader.read([remote.handle(9), *forged], SLOTS[:6], soon())
    assert reasons(report) == [None] + [Reason.KV_CHECKSUM_MISMATCH] * 5
    assert report.bytes == BLOCK


async def test_bad_destinations_are_refused(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    for offset in (-1, arena.size - BLOCK + 1, arena.size, 1 << 62):
        report = await reader.read([remote.handle(0)], [offset], soon())
        assert reasons(report) == [Reason.KV_BAD_HANDLE]
    overlapping = await reader.read(remote.handles(3), [0, SLOTS[3], BLOCK // 2], soon())
    assert reasons(overlapping) == [Reason.KV_BAD_HANDLE, None, Reason.KV_BAD_HANDLE]
    assert_filler(arena, SLOTS[:3])


async def test_part_of_a_batch_is_usable(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    await remote.tell("flip 4")
    handles = remote.handles(8)
    handles[6] = remote.handle(6, segments=(Segment(0, remote.peer.arena_bytes, BLOCK),))
    report = await reader.read(handles, SLOTS[:8], soon())
    expected: list[Reason | None] = [None] * 8
    expected[4] = Reason.KV_CHECKSUM_MISMATCH
    expected[6] = Reason.KV_BAD_HANDLE
    assert reasons(report) == expected
    assert report.verified_prefix() == 4
    assert report.bytes == 6 * BLOCK
    for block in (0, 1, 2, 3, 5, 7):
        assert bytes(arena.view(SLOTS[block], BLOCK)) == remote.content(block)


async def test_a_flipped_byte_is_seen(remote: Remote, reader: Transport) -> None:
    await reader.pair(remote.peer, soon())
    assert (await reader.read([remote.handle(2)], [0], soon())).verified_prefix() == 1
    await remote.tell("flip 2")
    assert reasons(await reader.read([remote.handle(2)], [0], soon())) == [Reason.KV_CHECKSUM_MISMATCH]
    assert reasons(await reader.read([remote.handle(2)], [0], soon(), verify=False)) == [None]
    assert reasons(await reader.read(remote.handles(), SLOTS, soon())).count(Reason.KV_CHECKSUM_MISMATCH) == 1


# --- deadlines, stopped and killed peers ----------------------------------------------------------------------------


async def test_a_deadline_in_the_past_reads_nothing(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    report = await reader.read(remote.handles(3), SLOTS[:3], time.monotonic() - 1.0)
    assert reasons(report) == [Reason.KV_TRANSFER_TIMEOUT] * 3
    assert not report.late
    assert_filler(arena, SLOTS)


async def test_stopped_peer(remote: Remote, reader: Transport, way: Way) -> None:
    """The deadline ends the wait; where the kernel copies without the peer, there is nothing to wait for.

    A second stop finds the connection in use for long, so nothing of its making is left that could need the peer.
    """
    await reader.pair(remote.peer, soon())
    for stop in range(2):
        remote.stop()
        report = await reader.read(remote.handles(), SLOTS, short())
        if way.needs_peer:
            assert reasons(report) == [Reason.KV_TRANSFER_TIMEOUT] * BLOCKS
            assert report.bytes == 0
        elif stop == 1:
            assert report.verified_prefix() == BLOCKS
        remote.resume()
        if report.settled is not None:
            await asyncio.wait_for(report.settled, HANG_S)
        assert (await reader.read(remote.handles(), SLOTS, soon())).verified_prefix() == BLOCKS


async def test_late_read_corrupts_nothing(start_remote: Starter, reader: Transport, arena: Arena, way: Way) -> None:
    stopped, alive = await asyncio.gather(start_remote("stopped"), start_remote("alive"))
    await reader.pair(stopped.peer, soon())
    await reader.pair(alive.peer, soon())
    if not way.needs_peer:
        pytest.skip("the kernel copies without the peer: no read of a stopped one is late")
    stopped.stop()
    wanted = SLOTS[:8]
    report = await reader.read(stopped.handles(8), wanted, short())
    assert reasons(report) == [Reason.KV_TRANSFER_TIMEOUT] * 8
    assert set(report.late) == (set(wanted) if way.late else set())
    assert reader.quarantined() == set(report.late)

    # Reuse: late slots are refused, the rest of the arena serves others meanwhile.
    reused = await reader.read(alive.handles(BLOCKS), SLOTS, soon())
    for slot, reason in zip(SLOTS, reasons(reused), strict=True):
        assert reason is (Reason.KV_TRANSFER_FAILED if slot in report.late else None)
    halfway = await reader.read([alive.handle(0)], [BLOCK // 2], soon())
    assert reasons(halfway) == [Reason.KV_TRANSFER_FAILED if way.late else None]
    if not way.late:
        assert (await reader.read(alive.handles(1), [0], soon())).verified_prefix() == 1

    stopped.resume()
    if report.settled is not None:
        await asyncio.wait_for(report.settled, HANG_S)
    await asyncio.sleep(0.2)  # whatever could still come has had its time
    assert not reader.quarantined()
    for block, slot in enumerate(SLOTS):
        if slot not in report.late:
            assert bytes(arena.view(slot, BLOCK)) == alive.content(block) or slot in (0, BLOCK)
    again = await reader.read(alive.handles(BLOCKS), SLOTS, soon())
    assert again.verified_prefix() == BLOCKS
    await asyncio.sleep(0.1)
    for block, slot in enumerate(SLOTS):
        assert bytes(arena.view(slot, BLOCK)) == alive.content(block)


async def test_cancelled_read_corrupts_nothing(remote: Remote, reader: Transport, arena: Arena, way: Way) -> None:
    """On the same host the read is over before it can be cancelled, but for one run of CI on a busy machine: there it
    waited for the peer that was stopped just after it was paired. It must be right then, too."""
    await reader.pair(remote.peer, soon())
    remote.stop()
    task = asyncio.create_task(reader.read(remote.handles(8), SLOTS[:8], soon()))
    await asyncio.sleep(0.1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    late = reader.quarantined()
    if way.needs_peer:
        assert task.cancelled()
        assert bool(late) == way.late
    else:
        assert task.cancelled() == bool(late)
    assert late in (set(), set(SLOTS[:8]))
    if not late:
        arena.buffer[:] = b"\xa5" * arena.size  # free again: somebody else's bytes now
    remote.resume()
    await out_of_quarantine(reader)
    await asyncio.sleep(0.1)
    assert_filler(arena, SLOTS[8:] if late else SLOTS)
    assert (await reader.read(remote.handles(), SLOTS, soon())).verified_prefix() == BLOCKS


async def test_peer_killed_mid_read(remote: Remote, reader: Transport, arena: Arena, way: Way) -> None:
    """The failure is seen long before the deadline, and every block that is called good is good."""
    await reader.pair(remote.peer, soon())
    if way.needs_peer:
        remote.stop()  # so that the read is surely under way when it dies
    task = asyncio.create_task(reader.read(remote.handles(), SLOTS, time.monotonic() + 10 * HANG_S))
    await asyncio.sleep(0.1 if way.needs_peer else 0.0)
    await remote.kill()
    report = await asyncio.wait_for(task, HANG_S)
    for block, read in enumerate(report.blocks):
        assert read.reason in (None, Reason.KV_TRANSFER_FAILED)
        if read.reason is None:
            assert bytes(arena.view(SLOTS[block], BLOCK)) == remote.content(block)
    if way.needs_peer:
        assert report.verified_prefix() == 0
    assert not reader.quarantined()
    gone = await reader.read(remote.handles(2), SLOTS[:2], soon())
    assert reasons(gone) == [Reason.KV_TRANSFER_FAILED] * 2


async def test_killed_while_it_owes_late_reads(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    remote.stop()
    report = await reader.read(remote.handles(4), SLOTS[:4], short())
    await remote.kill()
    if report.settled is not None:
        await asyncio.wait_for(report.settled, HANG_S)
    assert not reader.quarantined()
    assert_filler(arena, SLOTS[4:])


async def test_new_epoch_does_not_free_what_the_old_one_owes(start_remote: Starter, reader: Transport) -> None:
    """Dropping the old agent early would call its reads over while their bytes still land."""
    before = await start_remote("p")
    await reader.pair(before.peer, soon())
    before.stop()
    report = await reader.read(before.handles(4), SLOTS[:4], short())
    after = await start_remote("p")
    await reader.pair(after.peer, soon())
    assert (await reader.read(after.handles(4), SLOTS[4:8], soon())).verified_prefix() == 4
    assert reader.quarantined() == set(report.late)
    before.resume()
    if report.settled is not None:
        await asyncio.wait_for(report.settled, HANG_S)
    assert (await reader.read(after.handles(4), SLOTS[:4], soon())).verified_prefix() == 4


async def test_a_peer_that_owes_reads_gets_a_bounded_number_of_them(remote: Remote, reader: Transport) -> None:
    await reader.pair(remote.peer, soon())
    remote.stop()
    reports = []
    for slot in SLOTS:
        reports.append(await reader.read([remote.handle(0)], [slot], time.monotonic() + 0.05))
    assert len(reader.quarantined()) <= 4
    remote.resume()
    for report in reports:
        if report.settled is not None:
            await asyncio.wait_for(report.settled, HANG_S)


# --- idle and closed ------------------------------------------------------------------------------------------------


async def test_idle_costs_nothing(start_remote: Starter, reader: Transport) -> None:
    remote = await start_remote()
    await reader.pair(remote.peer, soon())
    assert (await reader.read(remote.handles(), SLOTS, soon())).verified_prefix() == BLOCKS
    theirs = (await remote.tell("release"))["cpu"]
    ours = time.process_time()
    await asyncio.sleep(1.5)
    assert time.process_time() - ours < 0.03
    assert (await remote.tell("cpu"))["cpu"] - theirs < 0.03
    await remote.tell("lease")
    assert (await reader.read(remote.handles(), SLOTS, soon())).verified_prefix() == BLOCKS


async def test_closed_is_closed(remote: Remote, reader: Transport) -> None:
    await reader.pair(remote.peer, soon())
    await reader.close()
    await reader.close()
    report = await reader.read(remote.handles(2), SLOTS[:2], soon())
    assert all(reason in (Reason.KV_TRANSFER_FAILED, Reason.KV_STALE_EPOCH) for reason in reasons(report))
    with pytest.raises(BatonError):
        await reader.pair(remote.peer, soon())
