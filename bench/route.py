"""What a `Route` costs at scale: 1,000 workers, 1,000,000 indexed blocks, 32 to 256 keys a query, 60 % of them known.

The router's own service, index, reservations and policy, fed as their streams would; only nobody is behind the workers'
addresses. Between two routes two workers report their load (1,000 routes a second). Told apart: the call
in the process (its CPU time and its wall time), and the call through gRPC from another process (wall time at the
client, one at a time; CPU time of the router process for each, everything included).

Chains are 256 blocks long. Nine of ten are on one worker, a tenth on 8, a hundredth on 100 workers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any, cast

import psutil
import structlog
import uvloop
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from baton.kv.layout import LayoutFingerprint
from baton.registry import Registry
from baton.rpc.channel import Channels
from baton.rpc.server import RpcServer
from baton.rpc.tasks import Background
from baton.v1 import kv_pb2, registry_pb2, router_pb2, router_pb2_grpc, worker_pb2
from services.router.costs import Parameters
from services.router.index import PrefixIndex
from services.router.loads import LoadRates
from services.router.metrics import RouterMetrics
from services.router.prefetch import Prefetcher
from services.router.quarantine import Quarantine
from services.router.rates import PrefillShare, Rates
from services.router.reservations import Reservations
from services.router.service import RouterService
from services.router.speculation import Speculation
from services.router.stores import Stores
from services.router.workers import Known, Workers

CHAIN = 256
KNOWN = 0.6
REPORTS = 2
EPOCH = 7
MODEL = "bench"
_ROLES = (registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE, registry_pb2.ROLE_DECODE,
          registry_pb2.ROLE_MERGED)  # fmt: skip


class StillWorkers(Workers):
    """A fleet that is only known: nobody is there to be watched."""

    def _restart(self, known: Known) -> None:
        known.watched = True

    def report(self, id: str, load: worker_pb2.Load) -> None:
        """The worker's stream says so."""
        self._take(self.get(id), worker_pb2.WorkerUpdate(epoch=EPOCH, load=load))


class Bench:
    """A router that knows `count` workers and `blocks` blocks."""

    def __init__(self, count: int, blocks: int, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.chains = -(-blocks // CHAIN)
        self.index = PrefixIndex(blocks + CHAIN)
        reservations, rates, shares, loads = Reservations(), Rates(), PrefillShare(), LoadRates()
        background, metrics = Background("bench"), RouterMetrics(CollectorRegistry())
        speculation = Speculation(self.index)
        self.workers = StillWorkers(
            background, self.index, reservations, rates, shares, Quarantine(), speculation, Parameters()
        )
        stores = Stores(background, self.index, loads, Quarantine())
        prefetcher = Prefetcher(background, Channels(), metrics.prefetches)
        self.service = RouterService(
            self.workers, self.index, speculation, reservations, rates, shares, stores, loads, prefetcher, Parameters(),
            cast("Registry", None), metrics,
        )  # fmt: skip
        self.ids = [f"worker-{number:04d}" for number in range(count)]
        for number, id in enumerate(self.ids):
            self.workers.registered(id, _registration(id, _ROLES[number % len(_ROLES)], number))
            self.index.apply(id, EPOCH, 0, stored=[], removed=[], cleared=True)
        before = psutil.Process().memory_info().rss
        self._fill(blocks)
        gc.collect()
        self.bytes_per_block = (psutil.Process().memory_info().rss - before) / len(self.index)

    def queries(self, count: int) -> list[bytes]:
        """Serialised requests, so that each is met as it comes from the wire."""
        return [self._query(number).SerializeToString() for number in range(count)]

    def report_some(self) -> None:
        """Load reports of some workers."""
        for id in self.random.choices(self.ids, k=REPORTS):
            self.workers.report(
                id,
                worker_pb2.Load(
                    running=self.random.randrange(48),
                    queued_prefill_tokens=self.random.randrange(4000),
                    blocks_total=20_000,
                    blocks_free=self.random.randrange(10_000, 20_000),
                    prefill_tok_s=6000.0,
                    decode_step_s=0.02,
                ),
            )

    def _fill(self, blocks: int) -> None:
        seqs = dict.fromkeys(self.ids, 0)
        for number in range(self.chains):
            keys = _chain(number)[: blocks - number * CHAIN]
            holders = 100 if number % 100 == 0 else 8 if number % 10 == 0 else 1
            for id in self.random.sample(self.ids, min(holders, len(self.ids))):
                seqs[id] += 1
                for_each = [bytes(bytearray(key)) for key in keys]  # each event comes with bytes of its own
                self.index.apply(id, EPOCH, seqs[id], stored=for_each, removed=[], cleared=False)

    def _query(self, number: int) -> router_pb2.RouteRequest:
        length = self.random.randint(32, CHAIN)
        known = round(length * KNOWN)
        keys = _chain(self.random.randrange(self.chains))[:known]
        keys += [self.random.randbytes(16) for _ in range(length - known)]
        tokens = 32 * length + self.random.randrange(32)
        return router_pb2.RouteRequest(
            uid=f"q{number:08x}", model=MODEL, prompt_tokens=tokens, max_tokens=512, packed_keys=b"".join(keys)
        )


def _chain(number: int) -> list[bytes]:
    source = random.Random(number)
    return [source.randbytes(16) for _ in range(CHAIN)]


def _registration(id: str, role: registry_pb2.Role.ValueType, number: int) -> registry_pb2.Worker:
    layout = LayoutFingerprint("weights", 32, 8, 128, 32, "bfloat16")
    return registry_pb2.Worker(
        id=id, role=role, address=f"127.0.0.1:{10_000 + number}", epoch=EPOCH, model=MODEL,
        layout=kv_pb2.Layout(
            model="weights", layers=32, kv_heads=8, head_dim=128, block_size=32, dtype="bfloat16", quantisation="none",
            order="lkhtd", tensor_parallel=1, pipeline_parallel=1,
        ),
        fingerprint=layout.digest(), block_size=32, max_context=131_072, max_streams=64, pool_blocks=20_000,
        rates=registry_pb2.Rates(prefill_tok_s=6000, decode_step_s=0.02, transfer_bytes_s=2e10),
        transports=["nixl", "tcp"], host=f"node-{number // 8}", started=1.0,
    )  # fmt: skip


def _finish(call: Coroutine[Any, Any, router_pb2.RouteReply]) -> router_pb2.RouteReply:
    """Run a call that waits for nobody. Raises AssertionError when it does wait."""
    try:
        call.send(None)
    except StopIteration as done:
        return cast("router_pb2.RouteReply", done.value)
    raise AssertionError("a route waited for something")


def in_process(bench: Bench, count: int) -> Iterator[tuple[float, float]]:
    """(CPU, wall) seconds of each route."""
    for number, query in enumerate(bench.queries(count + count // 10)):
        bench.report_some()
        request = router_pb2.RouteRequest.FromString(query)
        wall, cpu = time.perf_counter(), time.thread_time()
        reply = _finish(bench.service.Route(request, None))
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        assert reply.HasField("plan"), reply
        if number >= count // 10:
            yield cpu, wall


async def _serve(workers: int, blocks: int) -> None:
    """The router process of the gRPC half: says its port, then reports loads until its input ends."""
    bench = Bench(workers, blocks)
    server = RpcServer("127.0.0.1", 0)
    server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, bench.service, "baton.v1.RouterService")
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await server.stop(0)


async def through_grpc(workers: int, blocks: int, queries: list[bytes]) -> dict[str, float]:
    """Wall milliseconds at the client, one call at a time, and CPU microseconds of the router process a call."""
    command = [sys.executable, "-m", "bench.route", "--serve", "--workers", str(workers), "--blocks", str(blocks)]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    channels = Channels()
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 300))
        stub = router_pb2_grpc.RouterServiceStub(channels.get(f"127.0.0.1:{port}"))
        warm = len(queries) // 10
        taken: list[float] = []
        started = 0.0
        for number, query in enumerate(queries):
            if number == warm:
                started = _cpu(process.pid)
            request = router_pb2.RouteRequest.FromString(query)
            wall = time.perf_counter()
            reply = await stub.Route(request, timeout=10.0)
            taken.append(time.perf_counter() - wall)
            assert reply.HasField("plan"), reply
        cpu = _cpu(process.pid) - started
    finally:
        await channels.close()
        process.kill()
        await process.wait()
    taken = sorted(taken[warm:])
    return {
        "median_ms": round(statistics.median(taken) * 1e3, 3),
        "p99_ms": round(taken[int(0.99 * len(taken))] * 1e3, 3),
        "cpu_us": round(cpu / len(taken) * 1e6, 1),
    }


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def summary(taken: list[tuple[float, float]], bench: Bench) -> dict[str, object]:
    """The in-process half, ready for JSON."""
    cpu, wall = sorted(c for c, _ in taken), sorted(w for _, w in taken)
    at = int(0.99 * len(taken))
    return {
        "p99_ms": round(wall[at] * 1e3, 3),
        "median_us": round(statistics.median(cpu) * 1e6, 1),
        "p99_cpu_ms": round(cpu[at] * 1e3, 3),
        "median_wall_us": round(statistics.median(wall) * 1e6, 1),
        "bytes_per_block": round(bench.bytes_per_block, 1),
        "workers": len(bench.ids),
        "blocks": len(bench.index),
        "places": sum(bench.index.held_by(id) for id in bench.ids),
    }


def show(result: dict[str, object]) -> None:
    """The table for people."""
    table = Table(title=f"Route among {result['workers']} workers, {result['blocks']} blocks")
    for name in ("", "median", "p99", "CPU median"):
        table.add_column(name, justify="right")
    table.add_row(
        "in the process", f"{result['median_wall_us']} us", f"{result['p99_ms']} ms", f"{result['median_us']} us"
    )
    grpc = cast("dict[str, float]", result["grpc"])
    table.add_row("through gRPC", f"{grpc['median_ms']} ms", f"{grpc['p99_ms']} ms", f"{grpc['cpu_us']} us (mean)")
    console = Console()
    console.print(table)
    console.print(f"{result['bytes_per_block']} bytes a block, {result['places']} places")


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="baton bench route", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--routes", type=int, default=5000)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if options.serve:
        uvloop.run(_serve(options.workers, options.blocks))
        return 0
    bench = Bench(options.workers, options.blocks)
    result = summary(list(in_process(bench, options.routes)), bench)
    result["grpc"] = uvloop.run(through_grpc(options.workers, options.blocks, bench.queries(options.routes)))
    show(result)
    if options.json:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
