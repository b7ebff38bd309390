"""The router as a real process, in front of real workers and a real etcd."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.kv.keys import block_keys
from baton.v1 import router_pb2, router_pb2_grpc, worker_pb2
from tests.etcd import EtcdServer
from tests.tiny_model import make_tiny_model
from tests.worker_process import WorkerProcess, frontend, settle

pytestmark = pytest.mark.integration

HANG_S = 60.0
PROMPT = list(range(1, 161))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="module")
def flags(etcd_server: EtcdServer, model: Path) -> dict[str, object]:
    return {
        "model": model,
        "served_name": "tiny",
        "dtype": "float32",
        "pool_gib": 0.02,
        "chunk_tokens": 64,
        "etcd": etcd_server.address,
    }


class Fleet:
    """Two prefills, a decode, a merged."""

    def __init__(self, directory: Path, flags: dict[str, object]) -> None:
        self._directory, self._flags = directory, flags
        self.workers = {
            id: WorkerProcess(id.split("-")[0], id, directory, **flags)
            for id in ("prefill-1", "prefill-2", "decode-1", "merged-1")
        }

    def restart(self, id: str) -> None:
        """A new process of the same id (the old one must be gone); returns when it is ready."""
        self.workers[id] = WorkerProcess(id.split("-")[0], id, self._directory, **self._flags)
        self.workers[id].wait_ready()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, flags: dict[str, object]) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), flags)
    try:
        for worker in fleet.workers.values():
            worker.wait_ready()
        yield fleet
    finally:
        for worker in fleet.workers.values():
            worker.stop()


@pytest.fixture
async def fleet(processes: Fleet) -> AsyncIterator[Fleet]:
    """The module's fleet, whole before each test and clean after it."""
    for id, worker in list(processes.workers.items()):
        if worker.process.poll() is not None:
            processes.restart(id)
    yield processes
    await settle(*(w for w in processes.workers.values() if w.process.poll() is None))


class Router:
    """A gRPC client of one router."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = router_pb2_grpc.RouterServiceStub(self.channel)
        self._uids = 0

    def request(self, prompt_tokens: int = 160, **fields: Any) -> router_pb2.RouteRequest:
        self._uids += 1
        defaults = {"uid": f"u{self._uids}", "model": "tiny", "max_tokens": 64}
        return router_pb2.RouteRequest(prompt_tokens=prompt_tokens, **{**defaults, **fields})

    async def route(self, prompt_tokens: int = 160, **fields: Any) -> router_pb2.RouteReply:
        return await self.stub.Route(self.request(prompt_tokens, **fields), timeout=HANG_S)

    async def explain(self, prompt_tokens: int = 160, **fields: Any) -> router_pb2.ExplainReply:
        return await self.stub.Explain(self.request(prompt_tokens, **fields), timeout=HANG_S)

    async def report(self, **outcome: Any) -> None:
        await self.stub.Report(router_pb2.ReportRequest(outcomes=[router_pb2.Outcome(**outcome)]), timeout=HANG_S)

    async def view(self) -> router_pb2.ViewReply:
        return await self.stub.View(router_pb2.ViewRequest(), timeout=HANG_S)

    async def worker(self, id: str) -> router_pb2.WorkerView:
        return next((w for w in (await self.view()).workers if w.worker.id == id), router_pb2.WorkerView())

    async def until(self, wanted: Callable[[dict[str, router_pb2.WorkerView]], bool]) -> None:
        """Wait for a view that is `wanted`."""
        end = time.monotonic() + HANG_S
        while True:
            view = await self.view()
            if wanted({w.worker.id: w for w in view.workers}):
                return
            assert time.monotonic() < end, view
            await asyncio.sleep(0.05)

    async def until_serving(self, *ids: str) -> None:
        await self.until(lambda seen: all(id in seen and seen[id].state == "serving" for id in ids))


@pytest.fixture(scope="module")
def router_process(
    tmp_path_factory: pytest.TempPathFactory, etcd_server: EtcdServer, processes: Fleet
) -> Iterator[WorkerProcess]:
    with WorkerProcess("router", "router-1", tmp_path_factory.mktemp("router"), etcd=etcd_server.address) as process:
        yield process


@pytest.fixture
async def router(router_process: WorkerProcess, fleet: Fleet) -> AsyncIterator[Router]:
    client = Router(router_process.address)
    try:
        await client.until_serving(*fleet.workers)
        yield client
        reply = await client.stub.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), timeout=HANG_S)
        assert not reply.findings
    finally:
        await client.channel.close()


@pytest.fixture
async def unreserved(router: Router) -> None:
    """For tests that count: what others have reserved has lapsed."""
    await router.until(lambda seen: not any(w.reserved_streams for w in seen.values()))


async def test_a_pair_of_an_idle_fleet(router: Router, fleet: Fleet) -> None:
    """Strict: on a toy model, rates measured on a busy machine may favour merged; the policy's own tests fix them."""
    reply = await router.route(fallback=worker_pb2.FALLBACK_STRICT)
    plan = reply.plan
    assert plan.mode == worker_pb2.MODE_DISAGGREGATED
    assert list(plan.reasons) == ["DISAGGREGATED"]
    assert plan.worker.id == "decode-1"
    assert plan.worker.address == fleet.workers["decode-1"].address
    assert {plan.prefill.id, plan.alternate.id} == {"prefill-1", "prefill-2"}
    known = (await router.worker(plan.prefill.id)).worker
    assert plan.prefill.epoch == known.epoch
    assert plan.predicted_ms["ttft"] > 0


@pytest.mark.usefixtures("unreserved")
async def test_a_burst_spreads_before_any_worker_reports(router: Router) -> None:
    """By time, not by number: of two prefills the faster one takes more."""
    strict = {"fallback": worker_pb2.FALLBACK_STRICT}
    taken = [(await router.route(**strict)).plan.prefill.id for _ in range(20)]
    assert {"prefill-1", "prefill-2"} == set(taken)
    view = await router.worker("prefill-1")
    assert view.reserved_prefill_tokens == 160 * taken.count("prefill-1")
    terms = [c.terms_ms for c in (await router.explain(**strict)).candidates if c.prefill]
    # One request's time apart, when both were as fast as when they registered; by number it would be twenty's.
    assert abs(terms[0]["queue"] - terms[1]["queue"]) <= 3 * max(one["prefill"] for one in terms)


@pytest.mark.usefixtures("unreserved")
async def test_explain_shows_every_candidate_and_reserves_nothing(router: Router) -> None:
    reply = await router.explain(fallback=worker_pb2.FALLBACK_STRICT)
    modes = sorted((c.mode, c.worker, c.prefill) for c in reply.candidates)
    assert modes == [
        (worker_pb2.MODE_DISAGGREGATED, "decode-1", "prefill-1"),
        (worker_pb2.MODE_DISAGGREGATED, "decode-1", "prefill-2"),
        (worker_pb2.MODE_MERGED, "merged-1", ""),
        (worker_pb2.MODE_LOCAL, "decode-1", ""),
    ]
    (chosen,) = [c for c in reply.candidates if c.chosen]
    assert (chosen.worker, chosen.prefill) == (reply.plan.worker.id, reply.plan.prefill.id)
    assert chosen.transport in ("nixl", "tcp")
    for candidate in reply.candidates:
        assert {"queue", "prefill", "transfer", "stall"} <= set(candidate.terms_ms)
        assert candidate.total_ms == pytest.approx(sum(candidate.terms_ms.values()))
    assert (await router.worker("decode-1")).reserved_streams == 0


async def test_merged_only_and_excluded(router: Router) -> None:
    assert (await router.route(merged_only=True)).plan.worker.id == "merged-1"
    plan = (await router.route(attempt=1, exclude=["prefill-1", "prefill-2"])).plan
    assert plan.mode in (worker_pb2.MODE_MERGED, worker_pb2.MODE_LOCAL)
    assert plan.reasons[0] == "PREFILL_UNAVAILABLE"
    assert "REROUTED" in plan.reasons
    failure = (await router.route(exclude=["decode-1", "merged-1"])).failure
    assert failure.reason == "DECODE_UNAVAILABLE"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "unheard of"}, "MODEL_NOT_FOUND"),
        ({"uid": ""}, "INVALID_REQUEST"),
        ({"prompt_tokens": 0}, "INVALID_REQUEST"),
        ({"deadline": 1.0}, "DEADLINE_EXCEEDED"),
        ({"prompt_tokens": 100_000}, "CONTEXT_LENGTH_EXCEEDED"),
        ({"ttft_slo_s": 1e-6}, "NO_CAPACITY"),
    ],
)
async def test_refusals_carry_their_reason(router: Router, fields: dict[str, Any], reason: str) -> None:
    assert (await router.route(**fields)).failure.reason == reason
    assert (await router.explain(**fields)).failure.reason == reason


@pytest.mark.usefixtures("unreserved")
async def test_a_request_ends_its_reservation_and_fills_the_index(router: Router, fleet: Fleet) -> None:
    async with frontend(fleet.workers["decode-1"]) as client:
        prompt = [(7 * n) % 300 for n in range(160)]
        keys = block_keys(client.root(), prompt)
        request = router.request(160, keys=keys, fallback=worker_pb2.FALLBACK_STRICT)
        plan = (await router.stub.Route(request, timeout=HANG_S)).plan
        assert plan.cached_tokens == 0
        assert (await router.worker("decode-1")).reserved_streams == 1
        result = await client.run(request.uid, prompt, plan, max_tokens=4)
        assert result.finish == {0: "length"}
        await router.until(lambda seen: seen["decode-1"].reserved_streams == 0)
        await router.until(lambda seen: seen[plan.prefill.id].indexed_blocks >= len(keys))
        assert result.route is not None
        await router.report(
            uid=request.uid,
            attempt=0,
            worker=plan.worker.id,
            prefill=plan.prefill.id,
            route=result.route,
            output_tokens=4,
        )
        again = await router.explain(160, keys=keys, fallback=worker_pb2.FALLBACK_STRICT)
        assert again.plan.prefill.id == plan.prefill.id, "the one that holds the prefix"
        assert again.plan.cached_tokens == 128
        learnt = next(c for c in again.candidates if c.prefill == plan.prefill.id)
        assert learnt.transport == result.route.transport


async def test_a_reported_failure_takes_a_worker_out_and_the_probe_brings_it_back(router: Router) -> None:
    await router.report(uid="x", worker="decode-1", reason="SESSION_LOST", failed_workers=["prefill-1"])
    assert (await router.worker("prefill-1")).state == "quarantined"
    for _ in range(8):
        plan = (await router.route(fallback=worker_pb2.FALLBACK_STRICT)).plan
        if (await router.worker("prefill-1")).state != "quarantined":
            break
        assert plan.prefill.id == "prefill-2"
        assert not plan.HasField("alternate")
    await router.until_serving("prefill-1")


async def test_killed_prefills_are_out_and_a_new_epoch_is_in(router: Router, fleet: Fleet) -> None:
    old = (await router.worker("prefill-1")).worker.epoch
    for id in ("prefill-1", "prefill-2"):
        fleet.workers[id].kill()
    await router.until(
        lambda seen: all(id not in seen or seen[id].state == "quarantined" for id in ("prefill-1", "prefill-2"))
    )
    plan = (await router.route()).plan
    assert plan.mode in (worker_pb2.MODE_MERGED, worker_pb2.MODE_LOCAL)
    assert plan.reasons[0] == "PREFILL_UNAVAILABLE"
    failure = (await router.route(fallback=worker_pb2.FALLBACK_STRICT)).failure
    assert failure.reason == "PREFILL_UNAVAILABLE"
    fleet.restart("prefill-1")
    await router.until_serving("prefill-1")
    plan = (await router.route(fallback=worker_pb2.FALLBACK_STRICT)).plan
    assert plan.prefill.id == "prefill-1"
    assert plan.prefill.epoch != old


async def test_a_draining_worker_is_left_alone(router: Router, fleet: Fleet) -> None:
    fleet.workers["merged-1"].signal(signal.SIGTERM)
    await router.until(lambda seen: "merged-1" not in seen or seen["merged-1"].state in ("draining", "quarantined"))
    assert (await router.route(merged_only=True)).plan.mode == worker_pb2.MODE_LOCAL
    fleet.workers["merged-1"].process.wait(HANG_S)
    await router.until(lambda seen: "merged-1" not in seen)


async def test_etcd_may_die_and_come_back(router: Router, etcd_server: EtcdServer) -> None:
    etcd_server.kill()
    try:
        for _ in range(5):
            assert (await router.route()).HasField("plan")
            await asyncio.sleep(0.1)
        end = time.monotonic() + HANG_S
        while (await router.view()).registry == "connected":
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        assert (await router.view()).registry.startswith("lost since")
        assert (await router.route()).HasField("plan")
    finally:
        etcd_server.start()
    end = time.monotonic() + HANG_S
    while (await router.view()).registry != "connected":
        assert time.monotonic() < end
        await asyncio.sleep(0.1)
    assert {w.state for w in (await router.view()).workers} == {"serving"}


async def test_a_second_router_learns_the_same_and_leaves_cleanly(
    router: Router, fleet: Fleet, etcd_server: EtcdServer, tmp_path: Path
) -> None:
    with WorkerProcess("router", "router-2", tmp_path, etcd=etcd_server.address) as process:
        second = Router(process.address)
        await second.until_serving(*fleet.workers)
        first_view, second_view = await router.view(), await second.view()
        assert [w.worker for w in first_view.workers] == [w.worker for w in second_view.workers]
        assert first_view.indexed_keys == second_view.indexed_keys
        process.process.terminate()
        answered = 0

        async def ask_on() -> None:
            nonlocal answered
            while (await second.explain()).HasField("plan"):
                answered += 1

        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await ask_on()
        # Who asks until the end is refused, not failed. CANCELLED: gRPC had the call when it stopped taking calls.
        assert gone.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert answered
        await second.channel.close()
        assert await asyncio.to_thread(process.process.wait, HANG_S) == 0
