"""The decode side does not compute the prompt: with the true KV, garbage in the prompt's place changes nothing.

The blocks' names are forged for it: a handle that the prefill announced for the true prompt is renamed to what the
garbage prompt expects, its checksum made anew over the true bytes. Everything else is real: two engines, a transport.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.port import FirstToken, PrefillDone, Reader, Request, SamplingParams, SealedBlocks
from baton.engine.torch.host import TorchEngine
from baton.errors import Reason
from baton.kv.handle import Handle, checksum
from baton.kv.keys import block_keys, chain
from baton.transfer.port import Peer, ReadReport
from baton.transfer.tcp.transport import TcpTransport

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT_KEY = bytes(16)
TOKENS = 24
HANG_S = 120.0


class Side:
    """One engine with a transport over its arena."""

    def __init__(self, model: Path, name: str, epoch: int) -> None:
        self.engine = TorchEngine(model, dtype="float32", arena_bytes=1 << 26, epoch=epoch, owner=name)
        self.transport = TcpTransport("127.0.0.1")
        self._name, self._epoch = name, epoch

    async def start(self, stack: AsyncExitStack) -> Side:
        stack.push_async_callback(self.engine.close)
        spec = await self.engine.start()
        stack.push_async_callback(self.transport.close)
        slot = spec.fingerprint.block_bytes
        await self.transport.start(self.engine.arena, self._name, self._epoch, slot_bytes=slot)
        return self

    @property
    def peer(self) -> Peer:
        metadata = {self.transport.name: self.transport.metadata()}
        return Peer(self._name, self._epoch, self.engine.arena.size, metadata)


class TransportReader(Reader):
    """Reads over one transport."""

    def __init__(self, transport: TcpTransport) -> None:
        self._transport = transport

    async def read(self, handles: Sequence[Handle], into: Sequence[int], deadline: float) -> ReadReport:
        return await self._transport.read(handles, into, deadline)


@pytest.fixture
async def sides(model_path: Path) -> AsyncIterator[tuple[Side, Side]]:
    """A prefill side and a decode side that can read from it; both pools are clean at the end."""
    async with AsyncExitStack() as stack:
        prefill = await Side(model_path, "prefill", 11).start(stack)
        decode = await Side(model_path, "decode", 22).start(stack)
        await decode.transport.pair(prefill.peer, time.monotonic() + HANG_S)
        with prefill.transport.lease():
            yield prefill, decode
        for side in (prefill, decode):
            assert await side.engine.check_integrity() == []


def ask(uid: str, ids: Sequence[int]) -> Request:
    """A greedy request."""
    sampling = SamplingParams(max_tokens=TOKENS, seed=1, temperature=0.0, ignore_eos=True)
    return Request(uid, 0, ids, sampling, ROOT_KEY, time.time() + HANG_S)


def names(ids: Sequence[int], size: int) -> list[bytes]:
    """Keys of every block of a prompt, the partial last one included."""
    keys = block_keys(ROOT_KEY, ids, size)
    tail = ids[len(keys) * size :]
    return [*keys, chain(keys[-1], tail)] if tail else keys


async def generated(engine: TorchEngine, uid: str) -> list[int]:
    """Every token of a request whose generation has been started."""
    tokens: list[int] = []
    async for step in engine.events():
        for event in step:
            assert event.error is None, event
            if event.uid == uid:
                tokens += event.token_ids
                if event.finish is not None:
                    return tokens
    raise AssertionError("the engine's events ended")


async def test_garbage_prompt_with_true_kv_gives_the_true_output(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    size = prefill.engine.spec.block_size
    true_ids = random.Random(5).choices(range(1000, 40000), k=7 * size + 11)
    garbage_ids = random.Random(6).choices(range(1000, 40000), k=len(true_ids))
    assert all(true != garbage for true, garbage in zip(true_ids, garbage_ids, strict=True))

    announced: list[Handle] = []
    first: tuple[FirstToken, ...] = ()
    source = await prefill.engine.reserve(ask("source", true_ids), decode_room=False)
    async for event in prefill.engine.prefill(source):
        if isinstance(event, SealedBlocks):
            announced += event.handles
        elif isinstance(event, PrefillDone):
            first = event.first
    assert len(announced) == 8

    # What is true: the prefill's own continuation, computed from the true prompt by the engine that never moved KV.
    same = await prefill.engine.reserve(ask("true", true_ids))
    await prefill.engine.generate(same)
    truth = await generated(prefill.engine, "true")
    assert truth[0] == first[0].token_id

    # What garbage gives when it is computed.
    plain = await decode.engine.reserve(ask("garbage", garbage_ids))
    await decode.engine.generate(plain)
    nonsense = await generated(decode.engine, "garbage")
    assert nonsense != truth
    await decode.engine.clear_cache()
    computed = decode.engine.stats().prefill_tokens_computed
    assert computed == len(garbage_ids)

    reservation = await decode.engine.reserve(ask("forged", garbage_ids))
    assert reservation.cached_tokens == 0
    reader, deadline = TransportReader(decode.transport), time.monotonic() + HANG_S
    # The true names do not verify for this prompt, nor do forged names without a forged checksum.
    refused = await reservation.load(0, announced, reader, deadline)
    assert {block.reason for block in refused.blocks} == {Reason.KV_BAD_HANDLE}
    renamed = [replace(h, key=key) for h, key in zip(announced, names(garbage_ids, size), strict=True)]
    unsigned = await reservation.load(0, renamed[:1], reader, deadline)
    assert [block.reason for block in unsigned.blocks] == [Reason.KV_CHECKSUM_MISMATCH]
    assert reservation.cached_tokens == 0

    report = await reservation.load(0, [_signed(h, prefill.engine) for h in renamed], reader, deadline)
    assert report.verified_prefix() == len(announced)
    assert reservation.cached_tokens == len(garbage_ids)
    await decode.engine.generate(reservation, first)
    assert [first[0].token_id, *await generated(decode.engine, "forged")] == truth
    assert decode.engine.stats().prefill_tokens_computed == computed, "decode computed prompt tokens"
    for one in (source, same, plain, reservation):
        await one.release()


def _signed(handle: Handle, owner: TorchEngine) -> Handle:
    (segment,) = handle.segments
    payload = owner.arena.view(segment.offset, segment.length)
    return replace(handle, checksum=checksum(handle.key, handle.epoch, handle.generation, payload))
