"""The engine's process: how it starts, dies, idles, and what the worker sees of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from baton.engine.progress import stuck
from baton.engine.torch import host
from baton.engine.torch.host import TorchEngine
from baton.errors import BatonError, Reason
from tests.stopping import stop
from tests.unit.torch_engine.client import HANG_S, ArenaReader, Client, request
from tests.unit.torch_engine.conftest import make_engine

ROOT = Path(__file__).resolve().parents[3]
PROMPT = [(i * i + 13 * i) % 300 for i in range(100)]

PARENT = """
import asyncio, sys
from pathlib import Path
from tests.unit.torch_engine.conftest import make_engine

async def main():
    engine = make_engine(Path(sys.argv[1]))
    await engine.start()
    print(engine.link.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def gone(pid: int) -> bool:
    """No such process, or one that only waits to be collected."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def wait_gone(pid: int) -> None:
    end = time.monotonic() + HANG_S
    while not gone(pid):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_its_death_is_seen_everywhere(tiny_model: Path) -> None:
    client = Client(make_engine(tiny_model))
    engine = client.engine
    await engine.start()
    stream = await client.submit(request(PROMPT, max_tokens=1500))
    reservation = await engine.reserve(request(PROMPT))
    other = await engine.reserve(request(PROMPT, root=b"x" * 16))
    events, _ = await client.first_blocks(other)
    async with asyncio.timeout(HANG_S):
        await stream.moved.wait()
        os.kill(engine.link.pid, signal.SIGKILL)
        with pytest.raises(BatonError) as caught:
            async for _ in events:
                pass
        assert caught.value.reason is Reason.ENGINE_FAILED
        for _ in range(2):
            with pytest.raises(BatonError) as caught:
                async for _ in engine.events():
                    pass
            assert caught.value.reason is Reason.ENGINE_FAILED
        async for _ in engine.cache_events():
            pass
        for call in (engine.reserve(request([1])), engine.check_integrity(), engine.generate(reservation)):
            with pytest.raises(BatonError) as caught:
                await call
            assert caught.value.reason is Reason.ENGINE_FAILED
        await reservation.release()
        await other.release()
        engine.stats()
        await client.close()
        await client.close()


def is_stuck(engine: TorchEngine) -> bool:
    stats = engine.stats()
    return stuck(stats.step_started, stats.step_predicted_s, time.time())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - a page of shared memory tells nobody that it changed
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_stopped_anywhere_it_is_known_to_be_stuck_until_it_moves(tiny_model: Path) -> None:
    """In a step or between two, and idle: as soon as there is something that it does not do."""
    client = Client(make_engine(tiny_model))
    engine = client.engine
    await engine.start()
    try:
        stop(engine.link.pid)
        assert not is_stuck(engine), "nobody asked it for anything"
        asking = asyncio.create_task(engine.reserve(request(PROMPT)))
        await until(lambda: is_stuck(engine))
        os.kill(engine.link.pid, signal.SIGCONT)
        await (await asking).release()
        await until(lambda: not is_stuck(engine))
        for n in range(4):
            stream = await client.submit(request(PROMPT, max_tokens=1500))
            async with asyncio.timeout(HANG_S):
                await stream.moved.wait()
            await asyncio.sleep(0.0007 * n)
            os.kill(engine.link.pid, signal.SIGSTOP)
            assert not is_stuck(engine)
            await until(lambda: is_stuck(engine))
            os.kill(engine.link.pid, signal.SIGCONT)
            await until(lambda: not is_stuck(engine))
            await client.idle()
        assert engine.stats().step_started == 0.0
    finally:
        await client.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_it_dies_with_its_parent(tiny_model: Path, busy: bool) -> None:
    script = PARENT
    if busy:
        script = script.replace(
            "    print(engine",
            "    from tests.unit.torch_engine.client import request\n"
            "    r = await engine.reserve(request([1, 2, 3], max_tokens=2000))\n"
            "    await engine.generate(r)\n"
            "    print(engine",
        )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tiny_model), cwd=ROOT, stdout=PIPE, stdin=DEVNULL
    )
    try:
        assert parent.stdout is not None
        child = int(await parent.stdout.readline())
        assert not gone(child)
    finally:
        parent.kill()
        await parent.wait()
    await wait_gone(child)


async def test_closing_in_the_middle_of_everything(tiny_model: Path) -> None:
    client = Client(make_engine(tiny_model))
    await client.engine.start()
    pid = client.engine.link.pid
    stream = await client.submit(request(PROMPT, max_tokens=1500))
    reading = await client.engine.reserve(request(PROMPT, root=b"y" * 16))
    stuck = ArenaReader(client.engine, client.engine)
    stuck.gate = asyncio.Event()
    task = asyncio.create_task(reading.load(0, [], stuck, time.monotonic() + 10))
    await stream.moved.wait()
    await client.close()
    await asyncio.gather(task, return_exceptions=True)
    assert gone(pid)


async def test_it_uses_no_cpu_when_idle(tiny_model: Path) -> None:
    """Before and after work; with a reservation open, which is no reason to spin either."""
    client = Client(make_engine(tiny_model))
    await client.engine.start()
    child = psutil.Process(client.engine.link.pid)
    try:
        for _ in range(2):
            await client.complete(request(PROMPT))
            held = await client.engine.reserve(request(PROMPT))
            await asyncio.sleep(0.2)
            before = child.cpu_times()
            await asyncio.sleep(2.0)
            after = child.cpu_times()
            used = after.user + after.system - before.user - before.system
            assert used <= 0.02, f"{used / 2.0:.1%} of a core"
            await held.release()
    finally:
        await client.close()


async def test_too_many_late_reads_end_it(tiny_model: Path) -> None:
    """A quarter of the pool behind a peer that does not answer: a new epoch is better."""
    client = Client(make_engine(tiny_model, blocks=12))
    await client.engine.start()
    source = await client.engine.reserve(request(PROMPT, root=b"s" * 16))
    handles, _ = await client.prefill(source)
    await source.release()
    await client.engine.clear_cache()
    here = await client.engine.reserve(request(PROMPT, root=b"s" * 16))
    reader = ArenaReader(client.engine, client.engine)
    reader.late = asyncio.get_running_loop().create_future()
    reader.fail = dict.fromkeys(range(4), Reason.KV_TRANSFER_TIMEOUT)
    with pytest.raises(BatonError) as caught:
        await here.load(0, handles, reader, time.monotonic() + 10)
    assert caught.value.reason is Reason.ENGINE_FAILED
    with pytest.raises(BatonError) as caught:
        await client.engine.reserve(request([1]))
    assert "late reads" in caught.value.message
    await client.close()


@pytest.mark.parametrize("what", ["missing", "empty", "small pool"])
async def test_a_start_that_fails_says_why(tiny_model: Path, tmp_path: Path, what: str) -> None:
    if what == "small pool":
        engine = make_engine(tiny_model, arena_bytes=4096)
    else:
        engine = make_engine(tmp_path / "nothing" if what == "missing" else tmp_path)
    with pytest.raises(BatonError) as caught:
        await engine.start()
    assert caught.value.reason is Reason.ENGINE_FAILED
    assert len(caught.value.message) > 20
    await engine.close()
    with pytest.raises(BatonError):
        await engine.reserve(request([1]))


async def test_tokens_that_nobody_takes_hold_the_engine_back(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is full, then the socket, then the engine waits; nothing is lost when they are taken at last."""
    monkeypatch.setattr(host, "MAX_STEPS", 8)
    engine = make_engine(tiny_model, blocks=600)
    await engine.start()
    try:
        requests = [request(PROMPT[: 5 + i], max_tokens=1500, logprobs=20, uid=f"u{i}") for i in range(8)]
        for one in requests:
            await engine.generate(await engine.reserve(one))
        async with asyncio.timeout(HANG_S):
            steps = -1
            while steps != engine.stats().steps or not engine._steps.full:
                steps = engine.stats().steps
                await asyncio.sleep(1.0)
        assert steps < 1000, "the engine has run to the end"
        tokens: dict[str, int] = {one.uid: 0 for one in requests}
        ended = 0
        async with asyncio.timeout(HANG_S):
            async for events in engine.events():
                for event in events:
                    assert event.offset == tokens[event.uid]
                    tokens[event.uid] += len(event.token_ids)
                    ended += event.finish is not None
                if ended == len(requests):
                    break
        assert set(tokens.values()) == {1500}
        assert await engine.check_integrity() == []
    finally:
        await engine.close()


async def test_a_small_pool_makes_the_context_short(tiny_model: Path) -> None:
    """Else a request could be taken in that the pool cannot hold to its end."""
    client = Client(make_engine(tiny_model, blocks=5))
    spec = await client.engine.start()
    assert spec.max_context == 4 * 32
    with pytest.raises(BatonError) as caught:
        await client.engine.reserve(request([1] * 128))
    assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert len(await client.complete(request([1] * 127, max_tokens=50))) == 1
    assert len(await client.complete(request([1], max_tokens=1000))) == 127
    assert await client.engine.check_integrity() == []
    await client.close()


async def test_its_memory_does_not_grow_with_every_length_of_prompt(tiny_model: Path) -> None:
    """Each number of rows is a shape of its own to the libraries below, and they keep what they compiled for it."""
    client = Client(make_engine(tiny_model, chunk_tokens=256))
    await client.engine.start()
    child = psutil.Process(client.engine.link.pid)

    async def meet(lengths: range) -> int:
        for length in lengths:
            await client.complete(request([length % 300] * length, max_tokens=1, root=length.to_bytes(16)))
        info = child.memory_info()
        return info.rss - info.shared

    async with asyncio.timeout(HANG_S):
        before = await meet(range(1, 31))
        grown = await meet(range(31, 231)) - before
    await client.close()
    assert grown < 64 << 20
