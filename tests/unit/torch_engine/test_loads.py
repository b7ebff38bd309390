"""KV that comes in: what is refused, what fails, what comes late, and what is given back at any moment."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from baton.engine.port import Request, Reservation
from baton.errors import BatonError, Reason
from baton.kv.handle import Handle, checksum
from tests.unit.torch_engine.client import HANG_S, ArenaReader, Client, request
from tests.unit.torch_engine.conftest import BLOCK_BYTES, Oracle

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROMPT = [(i * i + 5 * i) % 300 for i in range(150)]
"""Four full blocks and a tail."""


class Pair:
    """One request on both sides, prefilled on the first."""

    def __init__(self, engines: tuple[Client, Client], asked: Request) -> None:
        self.source, self.target = engines
        self.asked = asked
        self.reader = ArenaReader(self.source.engine, self.target.engine)
        self.there: Reservation
        self.here: Reservation
        self.handles: list[Handle]

    async def __aenter__(self) -> Pair:
        self.there = await self.source.engine.reserve(self.asked)
        self.here = await self.target.engine.reserve(self.asked)
        self.handles, self.done = await self.source.prefill(self.there)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.there.release()
        await self.here.release()

    async def load(self, first: int = 0, handles: list[Handle] | None = None) -> list[Reason | None]:
        handles = self.handles if handles is None else handles
        report = await self.here.load(first, handles, self.reader, time.monotonic() + 10)
        assert [b.handle for b in report.blocks] == handles
        return [b.reason for b in report.blocks]


@pytest.fixture
def asked() -> Request:
    return request(PROMPT, max_tokens=40)


async def test_handles_say_what_lies_there(engines: tuple[Client, Client], asked: Request) -> None:
    async with Pair(engines, asked) as pair:
        assert [h.tokens for h in pair.handles] == [32, 32, 32, 32, 22]
        for handle in pair.handles:
            (segment,) = handle.segments
            payload = pair.source.engine.arena.view(segment.offset, segment.length)
            assert checksum(handle.key, handle.epoch, handle.generation, payload) == handle.checksum
            assert (handle.owner, handle.epoch) == ("w1", 101)
        # [layers, 2, heads, tokens, head_dim] f32: the tail of every run of tokens is zero.
        tail = bytes(pair.source.engine.arena.view(pair.handles[-1].segments[0].offset, BLOCK_BYTES))
        run = 32 * 16 * 4
        for start in range(0, BLOCK_BYTES, run):
            assert any(tail[start : start + 22 * 64])
            assert not any(tail[start + 22 * 64 : start + run])


async def test_generations_rise(engines: tuple[Client, Client], asked: Request) -> None:
    """The same slot with the same content later is another block."""
    async with Pair(engines, asked) as pair:
        before = {h.segments[0].offset: h.generation for h in pair.handles}
    await pair.source.engine.clear_cache()
    seen = 0
    for n in range(30):
        again = await pair.source.engine.reserve(request(PROMPT, uid=f"again{n}", root=bytes([n]) * 16))
        handles, _ = await pair.source.prefill(again)
        for handle in handles:
            old = before.get(handle.segments[0].offset)
            assert old is None or handle.generation > old
            seen += old is not None
        await again.release()
    assert seen > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": b"x" * 16}, Reason.KV_BAD_HANDLE),
        ({"tokens": 31}, Reason.KV_BAD_HANDLE),
        ({"segments": ()}, Reason.KV_BAD_HANDLE),
        ({"fingerprint": "other"}, Reason.KV_LAYOUT_MISMATCH),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
async def test_a_wrong_handle_ends_the_prefix(
    engines: tuple[Client, Client], asked: Request, oracle: Oracle, change: dict[str, object], reason: Reason
) -> None:
    async with Pair(engines, asked) as pair:
        handles = list(pair.handles)
        handles[2] = replace(handles[2], **change)  # type: ignore[arg-type]
        assert await pair.load(0, handles) == [None, None, reason, reason, reason]
        assert pair.here.cached_tokens == 64
        stream = await pair.target.generate(pair.here)
        assert await stream.tokens() == oracle(PROMPT, 40)


async def test_a_gap_is_refused(engines: tuple[Client, Client], asked: Request) -> None:
    async with Pair(engines, asked) as pair:
        assert await pair.load(1, pair.handles[1:]) == [Reason.KV_BAD_HANDLE] * 4
        assert (pair.here.cached_tokens, pair.reader.reads) == (0, 0)
        assert await pair.load(0, pair.handles[:1]) == [None]
        assert await pair.load(1, pair.handles[1:]) == [None] * 4


async def test_more_blocks_than_the_prompt_has(engines: tuple[Client, Client], asked: Request) -> None:
    async with Pair(engines, asked) as pair:
        more = [*pair.handles, pair.handles[0]]
        assert await pair.load(0, more) == [None] * 5 + [Reason.KV_BAD_HANDLE]
        assert pair.here.cached_tokens == len(PROMPT)


async def test_what_is_here_is_not_read_again(engines: tuple[Client, Client], asked: Request, oracle: Oracle) -> None:
    source, target = engines
    await target.complete(request(PROMPT[:70]))
    async with Pair((source, target), asked) as pair:
        assert pair.here.hit_tokens == 64
        assert await pair.load() == [None] * 5
        assert pair.here.cached_tokens == len(PROMPT)
        assert await (await target.generate(pair.here, pair.done.first)).tokens() == oracle(PROMPT, 40)


@pytest.mark.parametrize("bad", [0, 2, 4])
async def test_flipped_bytes_are_computed_instead(
    engines: tuple[Client, Client], asked: Request, oracle: Oracle, bad: int
) -> None:
    async with Pair(engines, asked) as pair:
        view = pair.source.engine.arena.view(pair.handles[bad].segments[0].offset + 999, 1)
        view[0] ^= 1
        reasons = await pair.load()
        assert reasons[bad] is Reason.KV_CHECKSUM_MISMATCH
        assert pair.here.cached_tokens == 32 * bad
        # The first token is known, the KV is not all there: it is computed, and the token is not drawn again.
        stream = await pair.target.generate(pair.here, pair.done.first)
        assert await stream.tokens() == oracle(PROMPT, 40)
        view[0] ^= 1


async def test_late_slots_are_left_alone_until_settled(
    engines: tuple[Client, Client], asked: Request, oracle: Oracle
) -> None:
    async with Pair(engines, asked) as pair:
        settled = pair.reader.late = asyncio.get_running_loop().create_future()
        pair.reader.fail = {2: Reason.KV_TRANSFER_TIMEOUT, 3: Reason.KV_TRANSFER_TIMEOUT}
        report = await pair.here.load(0, pair.handles[:4], pair.reader, time.monotonic() + 10)
        assert [b.reason for b in report.blocks] == [None, None] + [Reason.KV_TRANSFER_TIMEOUT] * 2
        target = pair.target.engine
        assert target.stats().blocks_quarantined == 2
        assert len([f for f in await target.check_integrity() if "late read" in f]) == 2
        streams = [await pair.target.generate(pair.here)]
        streams += [await pair.target.submit(request(PROMPT, max_tokens=40, root=bytes([n]) * 16)) for n in range(8)]
        for offset in report.late:  # the bytes arrive while everything else goes on
            target.arena.view(offset, BLOCK_BYTES)[:] = b"\xff" * BLOCK_BYTES
        for stream in streams:
            assert await stream.tokens() == oracle(PROMPT, 40)
        assert target.stats().blocks_quarantined == 2
        settled.set_result(None)


async def test_the_next_load_uses_the_new_slots(engines: tuple[Client, Client], asked: Request, oracle: Oracle) -> None:
    """An alternate prefill is read into other slots than those that a first, stuck one may still write."""
    async with Pair(engines, asked) as pair:
        settled = pair.reader.late = asyncio.get_running_loop().create_future()
        pair.reader.fail = {1: Reason.KV_TRANSFER_TIMEOUT}
        report = await pair.here.load(0, pair.handles[:2], pair.reader, time.monotonic() + 10)
        pair.reader.fail, pair.reader.late = {}, None
        assert await pair.load(1, pair.handles[1:]) == [None] * 4
        pair.target.engine.arena.view(report.late[0], BLOCK_BYTES)[:] = b"\xff" * BLOCK_BYTES
        assert await (await pair.target.generate(pair.here, pair.done.first)).tokens() == oracle(PROMPT, 40)
        settled.set_result(None)


@pytest.mark.parametrize("then", ["compute", "load again", "release"])
async def test_a_cancelled_read_may_still_write(
    engines: tuple[Client, Client], asked: Request, oracle: Oracle, then: str
) -> None:
    async with Pair(engines, asked) as pair:
        assert await pair.load(0, pair.handles[:1]) == [None]
        stuck = ArenaReader(pair.source.engine, pair.target.engine)
        stuck.gate = asyncio.Event()
        stuck.verify = False
        task = asyncio.create_task(pair.here.load(1, pair.handles[1:], stuck, time.monotonic() + 10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stuck.reads == 1
        stream = None
        if then == "compute":
            stream = await pair.target.generate(pair.here)
        elif then == "load again":
            assert await pair.load(1, pair.handles[1:]) == [None] * 4
            stream = await pair.target.generate(pair.here, pair.done.first)
        else:
            await pair.here.release()
        crowd = [await pair.target.submit(request(PROMPT, max_tokens=40, root=bytes([n]) * 16)) for n in range(8)]
        await asyncio.gather(*(s.moved.wait() for s in crowd))
        # What the stuck read writes in the end is not what anybody expects.
        for handle in pair.handles[1:]:
            (segment,) = handle.segments
            pair.source.engine.arena.view(segment.offset, segment.length)[:] = b"\xff" * segment.length
        stuck.gate.set()
        for each in [*crowd, *([stream] if stream else [])]:
            assert await each.tokens() == oracle(PROMPT, 40)


async def test_release_while_loading(engines: tuple[Client, Client], asked: Request, oracle: Oracle) -> None:
    """The session ends while bytes are under way: the slots are not given to another before they have come."""
    async with Pair(engines, asked) as pair:
        pair.reader.gate = asyncio.Event()
        loading = asyncio.create_task(pair.here.load(0, pair.handles, pair.reader, time.monotonic() + 10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await pair.here.release()
        await pair.target.engine.check_integrity()
        assert pair.target.engine.stats().blocks_quarantined == 5
        crowd = [await pair.target.submit(request(PROMPT, max_tokens=40, root=bytes([n]) * 16)) for n in range(8)]
        pair.reader.gate.set()
        with pytest.raises(BatonError) as caught:
            await loading
        assert caught.value.reason is Reason.ABORTED
        for stream in crowd:
            assert await stream.tokens() == oracle(PROMPT, 40)


async def test_no_slot_in_the_place_of_a_late_one(
    engines: tuple[Client, Client], asked: Request, oracle: Oracle
) -> None:
    """The pool is full: nothing more can be loaded, and the request is computed when there is room again."""
    async with Pair(engines, asked) as pair:
        engine = pair.target.engine
        rest = []
        while engine.stats().blocks_free > 1:
            rest.append(await engine.reserve(request([1], root=bytes([len(rest)]) * 16), decode_room=False))
        rest.append(await engine.reserve(request([1], root=b"last" * 4), decode_room=False))
        settled = pair.reader.late = asyncio.get_running_loop().create_future()
        pair.reader.fail = {1: Reason.KV_TRANSFER_TIMEOUT}
        await pair.here.load(0, pair.handles[:2], pair.reader, time.monotonic() + 10)
        pair.reader.fail, pair.reader.late = {}, None
        assert await pair.load(1, pair.handles[1:]) == [Reason.NO_CAPACITY] * 4
        stream = await pair.target.generate(pair.here)
        for reservation in rest:
            await reservation.release()
        assert await stream.tokens() == oracle(PROMPT, 40)
        settled.set_result(None)


# ---- giving up, in every phase


async def _reserved(client: Client, asked: Request, pair: Pair) -> None:
    reservation = await client.engine.reserve(asked)
    await reservation.release()
    await reservation.release()


async def _prefilling(client: Client, asked: Request, pair: Pair) -> None:
    reservation = await client.engine.reserve(asked)
    events, _ = await client.first_blocks(reservation)
    await events.aclose()
    await reservation.release()


async def _prefilled(client: Client, asked: Request, pair: Pair) -> None:
    reservation = await client.engine.reserve(asked)
    await client.prefill(reservation)
    await reservation.release()


async def _generating(client: Client, asked: Request, pair: Pair) -> None:
    reservation = await client.engine.reserve(asked)
    stream = await client.generate(reservation)
    async with asyncio.timeout(HANG_S):
        await stream.moved.wait()
    await reservation.release()


async def _starting(client: Client, asked: Request, pair: Pair) -> None:
    reservation = await client.engine.reserve(asked)
    await client.generate(reservation)
    await reservation.release()


async def _loaded(client: Client, asked: Request, pair: Pair) -> None:
    reservation = await client.engine.reserve(asked)
    handles = [] if reservation.hit_tokens else pair.handles
    await reservation.load(0, handles, pair.reader, time.monotonic() + 10)
    await reservation.release()


async def _reserving(client: Client, asked: Request, pair: Pair) -> None:
    task = asyncio.create_task(client.engine.reserve(asked))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "phase", [_reserving, _reserved, _loaded, _prefilling, _prefilled, _starting, _generating], ids=lambda f: f.__name__
)
async def test_a_hundred_aborts(engines: tuple[Client, Client], asked: Request, phase: object, oracle: Oracle) -> None:
    """Nothing is left, and a request that ran beside them all is whole. (Leaks are looked for in the teardown.)"""
    client = engines[1]
    async with Pair(engines, asked) as pair:
        await pair.here.release()
        for batch in range(25):
            stream = await client.submit(request(PROMPT[:50], max_tokens=40, uid=f"beside{batch}"))
            several = [
                phase(client, request(PROMPT, max_tokens=500, choices=(0, 1), root=bytes([n + 1]) * 16), pair)  # type: ignore[operator]
                for n in range(5 if phase is not _generating else 3)
            ]
            await asyncio.gather(*several)
            await phase(client, request(PROMPT, max_tokens=500), pair)  # type: ignore[operator]
            assert await stream.tokens() == oracle(PROMPT[:50], 40)
    await client.idle()
