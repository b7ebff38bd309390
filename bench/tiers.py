"""What a prefix costs by where it lies: recomputed, or on the device, in a store's host memory, on its NVMe, remote.

One merged worker and one store of a real run (`baton up`), a prompt of `--tokens` and a few more of its own. TTFT at
the client, medians over prompts:

- recompute: nobody has seen it.
- device: the worker's own pool holds it.
- host, nvme, remote: the worker has forgotten it and the store holds it, in shared memory, on its disk only, or behind
  tcp instead of shared memory. What the router then decides is what is measured: below some length it recomputes.

A figure that is not of the tier it names ends the run with an error: the worker says for each prompt what it found
where, the store how many blocks it loaded from its disk meanwhile, and the kernel how many bytes that process fetched
from a device, so neither the host tier nor the page cache can pass for the disk.

Then the same for lengths from 16 tokens on, where a hit must never be slower than a miss; and conversations of several
turns with a common system prompt, against the same ones in which no two prompts share a token's KV. The gain stands
beside 1 / (1 - p h): p is the share of the run without reuse that prefill took, h the share of prompt tokens found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from baton.cli.process import Record, records
from baton.kv.keys import BLOCK_SIZE
from baton.v1 import kvstore_pb2, kvstore_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from bench.conversations import talk
from bench.load import Answer, stream
from bench.run import Run, running

SUFFIX = 16
"""Tokens after the prefix, different in each request."""
LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1000)
IDS = range(1000, 20000)
"""Ordinary words of the vocabulary."""
LOADED = "baton_kvstore_tier_operations_total"
"""The store's metric of what its lower tiers did."""
WAIT_S = 60.0
CALL_S = 10.0
AGAIN_S = 11.0
"""After so long a worker offers a block again that its store has: the store's second sighting."""
FORGOTTEN_S = 3.0
"""The router goes on expecting blocks for a while where it had them computed."""
OF_THE_TIER = 0.9
"""Of what was found in the store, the share that must have come from the tier which a figure names."""
ONE = ("--prefill", "0", "--decode", "0", "--merged", "1")


@dataclass(frozen=True)
class Disk:
    """Blocks that the store's disk tier loaded, and bytes that the store's process fetched from devices: since its
    start, or meanwhile. `block_bytes` is what one block takes there, `how` the way it reads; empty without a disk."""

    blocks: int = 0
    fetched: int = 0
    block_bytes: int = 0
    how: str = ""

    def since(self, before: Disk) -> Disk:
        """What was added."""
        return replace(self, blocks=self.blocks - before.blocks, fetched=self.fetched - before.fetched)


@dataclass(frozen=True)
class Measured:
    """TTFT in seconds of each prompt, how many of its tokens came from the worker's pool or a store, and what the
    store's disk did meanwhile."""

    ttft: list[float]
    cached: list[int]
    stored: list[int]
    disk: Disk = Disk()

    @property
    def median(self) -> float:
        """Of TTFT."""
        return statistics.median(self.ttft)


def words(count: int) -> list[int]:
    """Tokens that nobody has the KV of."""
    return random.SystemRandom().choices(IDS, k=count)


def record(run: Run, role: str) -> Record:
    """The one process of that role."""
    return next(one for one in records(run.home) if one.role == role)


def channel(run: Run, role: str) -> grpc.Channel:
    """To the one process of that role."""
    return grpc.insecure_channel(record(run, role).address, options=[("grpc.enable_http_proxy", 0)])


def view(run: Run) -> tuple[int, int]:
    """What the router knows: (blocks of the worker, blocks of the store)."""
    with channel(run, "router") as router:
        reply = router_pb2_grpc.RouterServiceStub(router).View(router_pb2.ViewRequest(), timeout=CALL_S)
    return sum(w.indexed_blocks for w in reply.workers), sum(s.indexed_blocks for s in reply.stores)


def settled(run: Run) -> int:
    """Wait until the store takes nothing more; its blocks, as the router knows them."""
    end = time.monotonic() + WAIT_S
    before, still = -1, 0
    while still < 4 and time.monotonic() < end:
        now = view(run)[1]
        still = still + 1 if now == before else 0
        before = now
        time.sleep(0.5)
    return before


def forget(run: Run) -> None:
    """The worker forgets every prefix, and the router learns it."""
    with channel(run, "merged") as worker:
        worker_pb2_grpc.WorkerServiceStub(worker).ClearCache(worker_pb2.ClearCacheRequest(), timeout=CALL_S)
    end = time.monotonic() + WAIT_S
    while view(run)[0] and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(FORGOTTEN_S)


def ask(run: Run, prompts: Sequence[Sequence[int]], tokens: int = 4) -> Measured:
    """One after the other, each with a suffix of its own. Raises RuntimeError when one fails."""

    async def all_of_them() -> list[Answer]:
        answers = []
        async with httpx.AsyncClient(base_url=run.url, trust_env=False) as client:
            for prompt in prompts:
                answers.append(Answer())
                await stream(client, run.model, [*prompt, *words(SUFFIX)], tokens, answers[-1])
        return answers

    answers = asyncio.run(all_of_them())
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"a request failed: {errors[0]}")
    return Measured(
        [a.ttft for a in answers],
        [a.story["cached_tokens"] for a in answers],
        [a.story["stored_tokens"] for a in answers],
    )


def by_tier(run: Run, length: int, count: int, *, evict: bool = False) -> dict[str, Measured]:
    """Recompute, device, and what the store holds, for `count` prefixes of `length` tokens. With `evict` other prompts
    then push them out of the store's memory; they have been offered twice before, as its disk wants."""
    ask(run, [words(length)])  # paths are warm
    prefixes = [words(length) for _ in range(count)]
    recompute = ask(run, prefixes)
    device = ask(run, prefixes)
    settled(run)
    if evict:
        time.sleep(AGAIN_S)
        ask(run, prefixes)
        settled(run)
        push_out(run, length)
    forget(run)
    before = disk(run)
    stored = ask(run, prefixes)
    stored = replace(stored, disk=disk(run).since(before))
    return {"recompute": recompute, "device": device, "stored": stored}


def push_out(run: Run, length: int) -> None:
    """Fill the store's memory twice over with other prompts. What was wanted twice is not pushed out by what is wanted
    once, so these are offered twice too, half of what fits at a time: of more the first would be forgotten again."""
    host = tiers(run)["host"]
    slots = host.capacity_bytes // (host.used_bytes // host.blocks)
    for _ in range(4):
        others = [words(length) for _ in range(max(1, slots // 2 // (length // BLOCK_SIZE)))]
        ask(run, others)
        time.sleep(AGAIN_S)
        ask(run, others)
        settled(run)


def tiers(run: Run) -> dict[str, kvstore_pb2.Tier]:
    """The store's tiers by name, as it says."""
    with channel(run, "kvstore") as store:
        reply = kvstore_pb2_grpc.KvStoreServiceStub(store).Stats(kvstore_pb2.StatsRequest(), timeout=CALL_S)
    return {tier.name: tier for tier in reply.tiers}


def disk(run: Run) -> Disk:
    """What the store's disk has done since its start."""
    tier = tiers(run).get("nvme")
    if tier is None:
        return Disk()
    store = record(run, "kvstore")
    text = httpx.get(store.metrics, trust_env=False).raise_for_status().text
    wanted = {"tier": "nvme", "operation": "load", "outcome": "ok"}
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    loaded = sum(s.value for s in samples if s.name == LOADED and s.labels == wanted)
    how = {"ok": "O_DIRECT"}.get(tier.state, tier.state)
    fetched = psutil.Process(store.pid).io_counters().read_bytes
    return Disk(int(loaded), fetched, tier.used_bytes // max(1, tier.blocks), how)


def prove(found: Measured, tier: str) -> None:
    """Raises RuntimeError when `found` is not of `tier`: "device" (the worker's own pool), "host", "remote", "nvme"."""
    here = found.cached if tier == "device" else found.stored
    if not all(here):
        raise RuntimeError(f"{tier}: nothing of {here.count(0)} of {len(here)} prompts came from there")
    if tier == "device":
        return
    did, blocks = found.disk, sum(found.stored) // BLOCK_SIZE
    if tier != "nvme" and did.blocks:
        raise RuntimeError(f"{tier}: {did.blocks} blocks came from the disk")
    if tier == "nvme" and did.blocks < OF_THE_TIER * blocks:
        raise RuntimeError(f"nvme: of {blocks} blocks only {did.blocks} came from the disk, the others from memory")
    loaded = did.blocks * did.block_bytes
    if tier == "nvme" and did.fetched < OF_THE_TIER * loaded:
        from_where = "the others from the page cache, or the folder is no disk's (--nvme-dir)"
        raise RuntimeError(f"nvme ({did.how}): of {loaded} bytes only {did.fetched} came from a device, {from_where}")


def local(console: Console, options: argparse.Namespace, cores: tuple[str, ...]) -> dict[str, Any]:
    """The worker's own pool, and a store on its host."""
    with running(*ONE, *cores, model=options.model) as run:
        found = by_tier(run, options.tokens, options.prompts)
        console.print(f"  host: {said(found)}", style="dim")
        prove(found["device"], "device")
        prove(found["stored"], "host")
        return {"device": ratio(found, "device"), "host": ratio(found, "stored")}


def remote(console: Console, options: argparse.Namespace, cores: tuple[str, ...]) -> dict[str, Any]:
    """A store that is read over tcp, as one on another host is."""
    with running(*ONE, *cores, model=options.model, settings={"transports": "tcp"}) as run:
        found = by_tier(run, options.tokens, options.prompts)
        console.print(f"  remote: {said(found)}", style="dim")
        prove(found["stored"], "remote")
        return {"remote": ratio(found, "stored")}


def nvme(console: Console, options: argparse.Namespace, cores: tuple[str, ...]) -> dict[str, Any]:
    """As host, but the store's memory is small and its disk is not. None when the store has no such tier."""
    with tempfile.TemporaryDirectory(prefix="baton-tiers-", dir=options.nvme_dir or None) as folder:
        small = {"capacity_gib": options.nvme_host_gib, "nvme_dir": Path(folder), "nvme_gib": 1.0}
        with running(*ONE, *cores, model=options.model, settings=small) as run:
            if "nvme" not in tiers(run):
                console.print("  nvme: untried, this store has no such tier", style="dim")
                return {"nvme": None}
            found = by_tier(run, options.tokens, options.prompts, evict=True)
            blocks = {name: tier.blocks for name, tier in tiers(run).items()}
            console.print(f"  nvme: {said(found)}; {found['stored'].disk}; {blocks}", style="dim")
            prove(found["stored"], "nvme")
            return {"nvme": ratio(found, "stored"), "nvme_disk": asdict(found["stored"].disk)}


def lengths(console: Console, options: argparse.Namespace, cores: tuple[str, ...]) -> dict[str, Any]:
    """For each length: TTFT of a miss and of what is in the store."""
    with running(*ONE, *cores, model=options.model) as run:
        wanted = [length for length in LENGTHS if length <= options.tokens]
        return {"lengths": [of_length(console, run, length, options.prompts) for length in wanted]}


def of_length(console: Console, run: Run, length: int, prompts: int) -> dict[str, Any]:
    """One row of the table."""
    found = by_tier(run, length, prompts)
    console.print(f"  {length} tokens: {said(found)}", style="dim")
    return {
        "tokens": length + SUFFIX,
        "miss_ms": round(found["recompute"].median * 1e3, 1),
        "hit_ms": round(found["stored"].median * 1e3, 1),
        "hit_over_miss": ratio(found, "stored"),
        "stored_tokens": max(found["stored"].stored),
    }


def conversations(console: Console, options: argparse.Namespace, cores: tuple[str, ...]) -> dict[str, Any]:
    """Several turns with a common system prompt."""
    with running(*ONE, *cores, model=options.model) as run:
        return {"conversations": talk(console, run, options.conversations, record(run, "merged").metrics)}


PARTS = {"local": local, "remote": remote, "nvme": nvme, "lengths": lengths, "conversations": conversations}


def ratio(found: dict[str, Measured], name: str) -> float:
    """Median TTFT over that of recomputing."""
    return round(found[name].median / found["recompute"].median, 3)


def said(found: dict[str, Measured]) -> str:
    """One line of words."""
    return ", ".join(f"{name} {m.median * 1e3:.0f} ms (stored {max(m.stored)})" for name, m in found.items())


def show(console: Console, result: dict[str, Any]) -> None:
    """The tables for people."""
    if names := [name for name in ("device", "host", "nvme", "remote") if name in result]:
        table = Table(title="TTFT over that of recomputing the prompt")
        for name in names:
            table.add_column(name, justify="right")
        table.add_row(*(str(result[name] if result[name] is not None else "untried") for name in names))
        console.print(table)
    if "nvme_disk" in result:
        did = Disk(**result["nvme_disk"])
        console.print(f"nvme: {did.blocks} blocks from the disk by {did.how}, {did.fetched} bytes from the device")
    if "lengths" in result:
        table = Table(title="by length of the prompt")
        for name in ("tokens", "miss ms", "hit ms", "hit / miss", "from the store"):
            table.add_column(name, justify="right")
        for row in result["lengths"]:
            table.add_row(*map(str, row.values()))
        console.print(table)
    if "conversations" in result:
        told = result["conversations"]
        console.print(
            f"{told['conversations']} conversations: {told['gain']} times the throughput of no reuse; "
            f"1 / (1 - p h) = {told['expected']} (p {told['p']}, h {told['h']})"
        )


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="baton bench tiers", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--tokens", type=int, default=1000, help="length of the shared prefix")
    parser.add_argument("--prompts", type=int, default=7, help="prefixes for each figure")
    parser.add_argument("--conversations", type=int, default=500, help="how many")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    parser.add_argument("--cores", default="", help="cores that workers are pinned to, as of `baton up`")
    parser.add_argument(
        "--nvme-dir", default="", help="where the store's disk tier lies; default: the temporary folder"
    )
    parser.add_argument("--nvme-host-gib", type=float, default=0.1, help="the store's memory beside its disk")
    parser.add_argument("--model", default="", help="model file or directory; default: the one of `baton up`")
    options = parser.parse_args(argv)
    console = Console()
    cores = ("--cores", options.cores) if options.cores else ()
    result: dict[str, Any] = {}
    for name in options.only:
        result |= PARTS[name](console, options, cores)
    show(console, result)
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
