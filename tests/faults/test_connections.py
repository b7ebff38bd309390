"""The first moments of a pair, and connections that died while nobody looked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from baton.v1 import worker_pb2 as pb
from tests.faults.conftest import Fleet, Oracle
from tests.faults.fleet import counted, handed_over, prompt
from tests.faults.sockets import deafen
from tests.integration.asking import ask, plain_client
from tests.worker_process import HANG_S, Frontend, WorkerProcess, frontend, settle

pytestmark = pytest.mark.integration

STORM = 16
SOON_S = 15.0
"""Far below the time that TCP itself would take to notice (15 minutes)."""
IDLE_S = 10.0
"""By then every dead connection of ours has been found out."""


@pytest.mark.parametrize("transports", ["nixl,tcp", "tcp"])
async def test_sixteen_hand_overs_right_after_start(
    tmp_path: Path, worker_flags: dict[str, object], greedy: Oracle, transports: str
) -> None:
    """A pair that has never met: one handshake, sixteen hand-overs, none by another way."""
    flags = {**worker_flags, "transports": transports}
    with contextlib.ExitStack() as both:
        prefill = WorkerProcess("prefill", "prefill-new", tmp_path, **flags)
        both.callback(prefill.stop)
        # In a registry that shows no prefill, nothing pairs the two beforehand.
        decode_process = WorkerProcess("decode", "decode-new", tmp_path, **{**flags, "cluster": "elsewhere"})
        both.callback(decode_process.stop)
        prefill.wait_ready()
        decode_process.wait_ready()
        prompts = [prompt(100 + 20 * i, "storm", i) for i in range(STORM)]
        async with frontend(decode_process) as decode:
            runs = [
                decode.run(f"storm-{i}", ids, handed_over(prefill), fallback=pb.FALLBACK_STRICT, max_tokens=8)
                for i, ids in enumerate(prompts)
            ]
            results = await asyncio.gather(*runs)
        assert [r.failure for r in results] == [""] * STORM
        assert [r.tokens[0] for r in results] == [greedy(ids, 8) for ids in prompts]
        assert {r.route.transport for r in results if r.route is not None} == {transports.partition(",")[0]}
        assert await counted(decode_process, "handovers_total", result="ok") == STORM
        await settle(prefill, decode_process)


@pytest.mark.slow
async def test_hand_over_on_dead_connections(tmp_path: Path, worker_flags: dict[str, object], greedy: Oracle) -> None:
    """Everything between decode and prefill went silent. Asked at once, the text is right all the same; asked after a
    while of idleness, nothing is noticed at all. A pair for each transport, idle at the same time."""
    with contextlib.ExitStack() as stack:
        pairs = {}
        for transports in ("nixl,tcp", "tcp"):
            flags = {**worker_flags, "transports": transports, "cluster": f"idle-{transports[:3]}"}
            named = {role: f"{role}-idle-{transports[:3]}" for role in ("prefill", "decode")}
            pairs[transports] = [WorkerProcess(role, name, tmp_path, **flags) for role, name in named.items()]
            for worker in pairs[transports]:
                stack.callback(worker.stop)
        for worker in (one for pair in pairs.values() for one in pair):
            worker.wait_ready()
        await asyncio.gather(*(_on_dead_connections(pair, transports, greedy) for transports, pair in pairs.items()))


async def _on_dead_connections(pair: list[WorkerProcess], transports: str, greedy: Oracle) -> None:
    prefill, decode_process = pair
    async with frontend(decode_process) as decode:
        await _many(decode, prefill, greedy, f"warm {transports}")
    await settle(*pair)
    _deafen(pair, all_ports=transports == "tcp")
    async with frontend(decode_process) as decode:
        began = time.monotonic()
        ids = prompt(300, "first after the cut", transports)
        first = await decode.run("first", ids, handed_over(prefill, local=True))
        took = time.monotonic() - began
        assert first.tokens == {0: greedy(ids, 16)}
        assert first.route is not None
        print(f"{transports}: first answer after {took:.1f} s, {list(first.route.reasons)}")
        assert took < SOON_S
    await asyncio.sleep(IDLE_S)
    async with frontend(decode_process) as decode:
        await _many(decode, prefill, greedy, f"well again {transports}")
    await settle(*pair)
    _deafen(pair, all_ports=transports == "tcp")
    await asyncio.sleep(IDLE_S)
    async with frontend(decode_process) as decode:
        await _many(decode, prefill, greedy, f"first after idleness {transports}")
    await settle(*pair)


async def _many(decode: Frontend, prefill: WorkerProcess, greedy: Oracle, name: str) -> None:
    """Hand-overs, more at once than a transport has connections, and none by another way."""
    prompts = [prompt(300, name, i) for i in range(8)]
    plan = handed_over(prefill)
    runs = [decode.run(f"{name}-{i}", p, plan, fallback=pb.FALLBACK_STRICT) for i, p in enumerate(prompts)]
    results = await asyncio.gather(*runs)
    assert [r.failure for r in results] == [""] * len(prompts)
    assert [r.tokens[0] for r in results] == [greedy(ids, 16) for ids in prompts]


def _deafen(workers: Collection[WorkerProcess], *more: int, all_ports: bool = False) -> None:
    """Their gRPC and HTTP connections, those to `more` ports, or all.

    On one host NIXL's own connections are spared: what dies there is a process, never a connection.
    """
    ports = [] if all_ports else [int(worker.address.rpartition(":")[2]) for worker in workers] + list(more)
    try:
        assert deafen(workers, ports) > 0
    except PermissionError:
        pytest.skip("another process's sockets cannot be had here")


async def test_every_connection_of_the_stack_is_dead(fleet: Fleet) -> None:
    """The first request after a silent cut of everything is answered, and soon the stack is whole again."""
    stack = fleet.stack
    async with plain_client() as client:
        url = stack.url()
        expected = (await ask(client, url, "What was before", 24)).text
    await asyncio.to_thread(stack.settle)
    _deafen(list(stack.processes.values()), int(stack.etcd.address.rpartition(":")[2]))
    async with plain_client() as client, asyncio.timeout(HANG_S):
        began = time.monotonic()
        answer = await ask(client, url, "What was before", 24)
        print(f"first answer after {time.monotonic() - began:.1f} s: {answer.status} {answer.story} {answer.error}")
        assert (answer.status, answer.text) == (200, expected)
        assert time.monotonic() - began < SOON_S
    await asyncio.to_thread(stack.wait_usable)
    async with plain_client() as client, asyncio.timeout(HANG_S):
        # Strict may be refused for as long as decode has not found out about its connection to prefill.
        while True:
            answer = await ask(client, stack.url("strict"), "What was before", 24)
            if answer.status != 503:
                break
            await asyncio.sleep(0.2)
    assert (answer.status, answer.text) == (200, expected), answer
