"""`python -m tests.faults.suite`: break a running Baton by a seed's schedule, and say what clients saw of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from baton.errors import Reason
from tests.faults.suite.inject import Injector
from tests.faults.suite.link import Link
from tests.faults.suite.load import ANSWER_S, Load, reference
from tests.faults.suite.moves import moves
from tests.faults.suite.report import Part, good, pauses, show, summary
from tests.faults.suite.requests import Ask, Reference, catalogue, with_stop
from tests.faults.suite.schedule import Kind, Menu, schedule
from tests.faults.suite.soak import Memory
from tests.faults.suite.stack import FaultStack
from tests.integration.stack import SERVED
from tests.tiny_model import make_tiny_model

CLEAR_EVERY_S = 2.0
"""How often every worker forgets its cached prefixes: else, soon, nothing would be handed over any more."""
LIVE_S = 3600.0


@dataclass(frozen=True)
class Plan:
    """One part: its stack, what may break, how many clients. `tokens`: length of most answers."""

    name: str
    stack: Callable[[Path, Path, Link | None], FaultStack]
    menu: Callable[[FaultStack], Menu]
    tokens: int
    longest_prompt: int
    clients: int
    network: bool = False


def _tiny(directory: Path, model: Path, link: Link | None) -> FaultStack:
    return FaultStack(
        directory, model, routers=2, frontends=2, etcds=3, prefill=2, decode=2, merged=1, pool_gib=0.06, max_streams=32
    )


def _hosts(directory: Path, model: Path, link: Link | None) -> FaultStack:
    return FaultStack(
        directory,
        model,
        prefill=2,
        decode=2,
        merged=1,
        link=link,
        far=["prefill-1", "prefill-2", "decode-2"],
        pool_gib=0.06,
    )


def _real(directory: Path, model: Path, link: Link | None) -> FaultStack:
    return FaultStack(directory, model, frontends=2, prefill=1, decode=2, merged=1)


def _menu(stack: FaultStack) -> Menu:
    streaming = stack.workers("decode", "merged")
    workers = stack.workers()
    others = [*stack.of_role("router"), *stack.of_role("kvstore")]
    everything = [*workers, *workers, *others, *stack.of_role("frontend")]
    etcd = ["etcd"]
    return Menu(
        targets={
            Kind.KILL: everything,
            Kind.RESTART: workers,
            Kind.STOP: everything,
            Kind.FREEZE: streaming,
            Kind.TERM: everything,
            Kind.COMPACT: etcd,
            Kind.LEADER: etcd,
            Kind.FLIP: workers,
        },
        weights={
            Kind.KILL: 5,
            Kind.RESTART: 2,
            Kind.STOP: 6,
            Kind.FREEZE: 3,
            Kind.TERM: 2,
            Kind.COMPACT: 1,
            Kind.LEADER: 1.5,
            Kind.FLIP: 1,
        },
        every_s=1.2,
    )


def _network_menu(stack: FaultStack) -> Menu:
    far = ["far host"]
    kinds = (Kind.CUT, Kind.DELAY, Kind.THROTTLE, Kind.LOSS, Kind.CORRUPT)
    return Menu(targets=dict.fromkeys(kinds, far), weights=dict.fromkeys(kinds, 1.0), every_s=1.5)


PLANS = {
    "processes": Plan("processes", _tiny, _menu, tokens=320, longest_prompt=700, clients=8),
    "network": Plan("network", _hosts, _network_menu, tokens=160, longest_prompt=700, clients=6, network=True),
    "weights": Plan("weights", _real, _menu, tokens=40, longest_prompt=400, clients=6),
}


async def run_part(
    plan: Plan,
    stack: FaultStack,
    link: Link | None,
    seed: int,
    faults: int,
    least: int,
    soak: Memory | None,
    say: Callable[[str], None],
) -> Part:
    """Break `stack` `faults` times while streams run, at least `least` of them. The stack is left whole."""
    part = Part(plan.name)
    urls = {stack.url(name): name for name in stack.of_role("frontend")}
    work = await _references(stack.url(next(iter(urls.values()))), plan, seed)
    say(f"{len(work)} kinds of requests")
    injector: Injector
    load = Load(list(urls), work, lambda url, since: injector.was_ill(urls[url], since), seed)
    injector = Injector(stack, load, link, say)
    rate = await asyncio.to_thread(stack.prefill_rate)
    if link is not None:
        known = {port for name, (_, flags) in stack.flags().items() for port in _ports(stack, name, flags)}
        link.corruptible = lambda source, destination: not {source, destination} & known
    async with asyncio.TaskGroup() as group:
        running = group.create_task(load.run(plan.clients))
        forgetting = group.create_task(_forget(stack, load))
        watching = group.create_task(soak.watch(stack)) if soak is not None else None
        try:
            async with asyncio.timeout(LIVE_S):
                menu, until = plan.menu(stack), math.inf
                if soak is not None:
                    menu = menu.sparing({stack.of_role(role)[0] for role in stack.roles()})
                    until = time.monotonic() + soak.left_s
                await injector.run(schedule(seed, faults, menu) if faults else [], until)
                await load.at_least(least)
                if soak is not None:
                    await asyncio.sleep(soak.left_s)
        finally:
            forgetting.cancel()
            if watching is not None:
                watching.cancel()
            load.finish()
            await asyncio.wait([running], timeout=2 * ANSWER_S)
    part.faults, part.streams, part.cut_texts_wrong = injector.done, load.streams, load.cut_texts_wrong
    logs = [stack.processes[name].log_path for name in stack.of_role("frontend")]
    part.pauses = pauses(injector.done, load.streams, moves(logs), rate)
    part.notes += await asyncio.to_thread(_counters, stack)
    if injector.flipped:
        part.notes.append(f"{injector.flipped} bytes flipped in pools")
    if link is not None:
        part.notes.append(f"{link.corrupted} packets corrupted, {link.dropped} dropped")
    return part


def _counters(stack: FaultStack) -> list[str]:
    """What the workers that run now counted since they started."""
    moved = sum(stack.metric(name, "baton_worker_transfer_bytes_total") for name in stack.workers())
    bad = sum(stack.metric(name, "baton_worker_kv_blocks_corrupted_total") for name in stack.workers())
    failures = {
        reason: int(count)
        for reason in (reason.name for reason in Reason if reason.name.startswith("KV_"))
        if (
            count := sum(
                stack.metric(name, "baton_worker_transfer_failures_total", reason=reason) for name in stack.workers()
            )
        )
    }
    return [f"{moved / 1e6:.0f} MB of KV read, blocks that failed: {failures}; cached blocks found changed: {bad:.0f}"]


def _ports(stack: FaultStack, name: str, flags: dict[str, object]) -> list[int]:
    process = stack.processes[name]
    return [int(address.rpartition(":")[2].partition("/")[0]) for address in (process.address, process.metrics)] + [
        int(member.port) for member in stack.members.members
    ]


async def _references(url: str, plan: Plan, seed: int) -> list[tuple[Ask, Reference]]:
    chance = random.Random(seed)
    work = []
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as client:
        for ask in catalogue(seed, SERVED, plan.tokens, plan.longest_prompt):
            found = await reference(client, url, ask)
            work.append((ask, found))
            stopped = with_stop(ask, found, chance) if ask.choices == 1 and len(work) % 3 == 0 else None
            if stopped is not None:
                work.append((stopped, await reference(client, url, stopped)))
    return work


async def _forget(stack: FaultStack, load: Load) -> None:
    while True:
        await asyncio.sleep(CLEAR_EVERY_S)
        if not load.paused:  # else a pool is about to be flipped, and there would be nothing in its cache
            await asyncio.to_thread(stack.forget_prefixes)


def main(argv: list[str] | None = None) -> int:
    """Run parts; 0 when nothing was lost, doubled, wrong, leaked or failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.suite", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default="processes,network,weights", help="comma separated")
    parser.add_argument("--faults", default="240,35,30", help="for each part; with one part any number")
    parser.add_argument("--streams", type=int, default=100, help="at least so many in each part")
    parser.add_argument(
        "--soak-minutes", type=float, default=0.0, help="go on so long, with faults while there are, and watch memory"
    )
    parser.add_argument("--model", default=".baton/models/smollm2-135m-instruct.gguf", help="for the part `weights`")
    options = parser.parse_args(argv)
    console = Console()
    names = options.parts.split(",")
    counts = [int(count) for count in options.faults.split(",")]
    parts: list[Part] = []
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"  {time.monotonic() - began:6.1f} s  {text}", style="dim", highlight=False)

    for name, count in zip(names, counts, strict=True):
        console.print(f"{name}: seed {options.seed}, {count} faults")
        parts.append(_whole_part(PLANS[name], options, count, say))
    show(console, parts)
    result = summary(parts)
    print(json.dumps(result), flush=True)
    return 0 if good(result) else 1


def _whole_part(plan: Plan, options: argparse.Namespace, faults: int, say: Callable[[str], None]) -> Part:
    """Start the stack, run, check, end it. What it leaves behind is a finding."""
    link = None
    soak = Memory(options.soak_minutes * 60) if options.soak_minutes else None
    if plan.network:
        try:
            link = Link(options.seed)
        except Exception as error:
            part = Part(plan.name)
            part.notes.append(f"left out: this machine allows no network namespaces or TUN devices ({error})")
            return part
    with tempfile.TemporaryDirectory(prefix="baton-faults-") as folder:
        directory = Path(folder)
        model = Path(options.model).resolve() if plan.name == "weights" else make_tiny_model(directory / "model")
        stack = plan.stack(directory, model, link)
        part = Part(plan.name)
        try:
            stack.start()
            say("the stack is up")
            part = asyncio.run(run_part(plan, stack, link, options.seed, faults, options.streams, soak, say))
            stack.heal()
            stack.settle()
        except Exception as error:
            part.findings.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            left = stack.end_all()
            if link is not None:
                link.close()
        part.findings += [f"left behind: {what}" for what in left]
        if soak is not None:
            part.notes += soak.lines()
            part.findings += soak.findings()
    return part


if __name__ == "__main__":
    sys.exit(main())
