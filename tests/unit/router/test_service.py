"""The router's face over a fleet that is only known, not running: decisions, reservations, learning."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from baton.registry import Registry
from baton.v1 import kv_pb2, registry_pb2, router_pb2, worker_pb2
from services.router.costs import Parameters
from services.router.loads import LoadRates
from services.router.metrics import RouterMetrics
from services.router.prefetch import Prefetcher
from services.router.quarantine import Quarantine
from services.router.rates import PrefillShare
from services.router.reservations import Held
from services.router.service import RouterService
from services.router.stores import Stores
from tests.unit.router.scripted_worker import LAYOUT, registration
from tests.unit.router.test_workers import DECODE, MERGED, PREFILL, Fleet

NO_CONTEXT = cast("grpc.aio.ServicerContext[Any, Any]", None)
KEYS = [bytes([n]) * 16 for n in range(10)]


@dataclass
class FakeState:
    connected: bool = True
    since: float = 0.0


class FakeRegistry:
    """Only what View asks for."""

    state = FakeState()


class Face(Fleet):
    """A service over workers that nobody can reach: the tests say what each one reports."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.collector = CollectorRegistry()
        self.loads = LoadRates()
        self.hints: list[tuple[str, int]] = []
        self.stores = Stores(self.background, self.index, self.loads, Quarantine())
        self.service = RouterService(
            self.workers,
            self.index,
            self.speculation,
            self.reservations,
            self.rates,
            PrefillShare(),
            self.stores,
            self.loads,
            cast("Prefetcher", self),
            Parameters(),
            cast("Registry", FakeRegistry()),
            RouterMetrics(self.collector),
            clock=lambda: self.now,
        )
        self.uids = 0

    def hint(self, store: registry_pb2.KvStore, keys: Sequence[bytes], tenant: str) -> None:
        """In place of the prefetcher."""
        self.hints.append((store.id, len(keys)))

    def add_store(self, id: str, tier: str = "host", keys: Sequence[bytes] = ()) -> None:
        """A store whose stream stands and has told of `keys`."""
        self.stores.registered(
            id, registry_pb2.KvStore(id=id, epoch=7, address="127.0.0.1:1", fingerprint=LAYOUT.digest())
        )
        known = next(k for k in self.stores.all() if k.store.id == id)
        known.watched = True
        self.index.apply(id, 7, 1, stored=keys, removed=(), cleared=True, tier=tier)

    def add(self, id: str, role: registry_pb2.Role.ValueType, **fields: object) -> None:
        self.workers.registered(id, registration(id, role, "127.0.0.1:1", **fields))

    async def route(self, **fields: Any) -> router_pb2.RouteReply:
        return await self.service.Route(self.request(**fields), NO_CONTEXT)

    async def explain(self, **fields: Any) -> router_pb2.ExplainReply:
        return await self.service.Explain(self.request(**fields), NO_CONTEXT)

    def request(self, **fields: Any) -> router_pb2.RouteRequest:
        self.uids += 1
        return router_pb2.RouteRequest(
            **{"uid": f"u{self.uids}", "model": "tiny", "prompt_tokens": 320, "max_tokens": 64, **fields}
        )

    def counted(self, name: str, **labels: str) -> float:
        return self.collector.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def face() -> AsyncIterator[Face]:
    found = Face()
    for id, role in (("p1", PREFILL), ("p2", PREFILL), ("d1", DECODE), ("m1", MERGED)):
        found.add(id, role)
    yield found
    reply = await found.service.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), NO_CONTEXT)
    assert list(reply.findings) == []
    await found.close()


async def test_a_plan_reserves_on_both_and_names_the_alternate(face: Face) -> None:
    plan = (await face.route(uid="a")).plan
    assert plan.mode == worker_pb2.MODE_DISAGGREGATED
    assert {plan.prefill.id, plan.alternate.id} == {"p1", "p2"}
    assert face.reservations.on(plan.prefill.id).prefill_tokens == 320
    assert face.reservations.on("d1").streams == 1
    assert face.counted("baton_router_routes_total", mode="disaggregated", reason="DISAGGREGATED") == 1
    again = (await face.route(uid="b")).plan
    assert again.prefill.id == plan.alternate.id, "the reservation sends the next one elsewhere"


async def test_reservations_end_in_time_or_by_report(face: Face) -> None:
    await face.route(uid="a")
    face.now += 1.9
    await face.route(uid="b")
    assert len(face.reservations) == 2
    face.now += 0.2
    await face.service.View(router_pb2.ViewRequest(), NO_CONTEXT)
    assert len(face.reservations) == 1
    await face.service.Report(router_pb2.ReportRequest(outcomes=[router_pb2.Outcome(uid="b", attempt=0)]), NO_CONTEXT)
    assert len(face.reservations) == 0


async def test_a_refusal_reserves_nothing_and_is_counted(face: Face) -> None:
    reply = await face.route(prompt_tokens=5000)
    assert reply.failure.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert len(face.reservations) == 0
    assert face.counted("baton_router_refusals_total", reason="CONTEXT_LENGTH_EXCEEDED") == 1


async def test_nobody_is_refused_for_a_limit_that_one_of_many_keeps(face: Face) -> None:
    slow = registry_pb2.Rates(prefill_tok_s=400, decode_step_s=0.03)
    for number in range(Parameters().whole + 4):
        face.add(f"slow-{number}", MERGED, model="many", rates=slow)
    face.add("busy", MERGED, model="many")  # the first token sooner, for the price of those who stream there
    face.reservations.take("others", 0, {"busy": Held(0.0, 6, 0)}, face.now)
    free = (await face.route(model="many")).plan
    assert free.worker.id != "busy"
    explained = await face.explain(model="many", ttft_slo_s=0.7)
    limited = await face.route(model="many", ttft_slo_s=0.7)
    assert limited.plan.worker.id == explained.plan.worker.id == "busy"
    assert limited.plan.predicted_ms["ttft"] <= 700
    late = await face.route(model="many", ttft_slo_s=0.3)
    assert late.failure.reason == "NO_CAPACITY"
    assert "0.30 s asked" in late.failure.message


async def test_an_unknown_model_and_a_model_without_workers(face: Face) -> None:
    assert (await face.route(model="nobody")).failure.reason == "MODEL_NOT_FOUND"
    face.workers.card_stands("nobody", registry_pb2.ModelCard(model="nobody"))
    assert (await face.route(model="nobody")).failure.reason == "DECODE_UNAVAILABLE"
    for id in ("p1", "p2", "d1", "m1"):
        face.workers.registered(id, None)
    assert (await face.route(model="never heard of")).failure.reason == "DECODE_UNAVAILABLE", "nobody is known yet"


async def test_the_past_is_refused(face: Face) -> None:
    assert (await face.route(deadline=time.time() - 1)).failure.reason == "DEADLINE_EXCEEDED"
    assert (await face.route(deadline=time.time() + 60)).HasField("plan")


@pytest.mark.parametrize(("field", "keys"), [("keys", KEYS), ("packed_keys", b"".join(KEYS))])
async def test_prefix_hits_pull_a_request_to_their_worker(face: Face, field: str, keys: object) -> None:
    face.index.apply("p2", 1, 1, stored=KEYS[:8], removed=[], cleared=True)
    plan = (await face.route(**{field: keys})).plan
    assert plan.prefill.id == "p2"
    assert plan.cached_tokens == 256
    assert face.reservations.on("p2").prefill_tokens == 320 - 256


async def test_the_same_prefix_again_counts_on_what_is_being_computed(face: Face) -> None:
    first = (await face.route(keys=KEYS)).plan
    assert first.cached_tokens == 0
    again = await face.explain(keys=[*KEYS[:5], *[b"z" * 16] * 5], fallback=worker_pb2.FALLBACK_STRICT)
    cached = {c.prefill: c.cached_tokens for c in again.candidates if c.prefill}
    other = ({"p1", "p2"} - {first.prefill.id}).pop()
    assert cached == {first.prefill.id: 160, other: 0}
    face.now += 30.0
    later = await face.explain(keys=KEYS, fallback=worker_pb2.FALLBACK_STRICT)
    assert {c.cached_tokens for c in later.candidates} == {0}, "it never came"
    assert len(face.speculation) == 0


async def test_larger_blocks_are_found_by_every_kth_key(face: Face) -> None:
    face.add("p3", PREFILL, block_size=64)
    face.index.apply("p3", 1, 1, stored=KEYS[1:8:2], removed=[], cleared=True)
    face.index.apply("p1", 1, 1, stored=KEYS[:2], removed=[], cleared=True)
    reply = await face.explain(keys=KEYS, fallback=worker_pb2.FALLBACK_STRICT)
    cached = {c.prefill: c.cached_tokens for c in reply.candidates if c.prefill}
    assert cached == {"p1": 64, "p2": 0, "p3": 256}


async def test_explain_marks_the_chosen_and_the_barred(face: Face) -> None:
    face.workers.failed("p1", "test")
    reply = await face.explain()
    assert [c.prefill for c in reply.candidates if c.chosen] == ["p2"]
    (barred,) = [c for c in reply.candidates if c.prefill == "p1"]
    assert barred.excluded.startswith("QUARANTINED: p1")
    assert reply.candidates[-1].excluded
    refused = await face.explain(exclude=["d1", "m1"])
    assert refused.failure.reason == "DECODE_UNAVAILABLE"
    assert len(refused.candidates) == 4


async def test_reports_teach_transfer_output_and_failures(face: Face) -> None:
    route = worker_pb2.RouteTaken(prefill="p1", worker="d1", kv_bytes=10_000_000, kv_seconds=0.1, transport="tcp")
    outcomes = [
        router_pb2.Outcome(uid="x", worker="d1", prefill="p1", route=route, output_tokens=20),
        router_pb2.Outcome(uid="y", worker="d1", reason="SESSION_LOST", failed_workers=["d1"]),
        router_pb2.Outcome(uid="z", worker="d1", reason="A_NEWER_REASON"),
    ]
    await face.service.Report(router_pb2.ReportRequest(outcomes=outcomes), NO_CONTEXT)
    assert face.rates.transfer("p1", "d1") == pytest.approx(1e8)
    assert face.rates.output_tokens < 128
    assert face.state("d1") == "quarantined"
    assert face.counted("baton_router_outcomes_total", reason="ok") == 1
    assert face.counted("baton_router_outcomes_total", reason="SESSION_LOST") == 1
    assert face.counted("baton_router_reported_failures_total") == 1
    plan = (await face.route()).plan
    assert plan.worker.id == "m1"
    assert list(plan.reasons) == ["NO_DECODE", "MERGED_FALLBACK"]


async def test_later_attempts_say_so(face: Face) -> None:
    plan = (await face.route(uid="a", attempt=1)).plan
    assert list(plan.reasons) == ["DISAGGREGATED", "REROUTED"]


async def test_the_view_tells_states_loads_and_reservations(face: Face) -> None:
    plan = (await face.route()).plan
    view = await face.service.View(router_pb2.ViewRequest(), NO_CONTEXT)
    assert view.registry == "connected"
    seen = {w.worker.id: w for w in view.workers}
    assert list(seen) == ["d1", "m1", "p1", "p2"]
    assert seen["d1"].reserved_streams == 1
    assert seen[plan.prefill.id].reserved_prefill_tokens == 320
    assert {w.state for w in view.workers} <= {"degraded", "quarantined"}


async def test_frequent_merged_prompts_make_merged_dearer(face: Face) -> None:
    """Interference is measured: what merged was given lately counts against its next stream."""
    before = (await face.explain()).candidates
    for number in range(5):
        await face.route(uid=f"m{number}", merged_only=True)
        face.now += 3.0
    after = (await face.explain()).candidates

    def interference(candidates: Any) -> float:
        return next(c.terms_ms["interference"] for c in candidates if c.worker == "m1")

    assert interference(after) >= interference(before)
    assert face.service._shares.of("m1", face.now) > 0.05


async def test_a_plan_names_the_store_that_it_loads_from(face: Face) -> None:
    keys = [bytes([n]) * 16 for n in range(40)]
    face.add_store("s", keys=keys)
    plan = (await face.route(prompt_tokens=1000, keys=keys[:31])).plan
    assert (plan.store.id, plan.store.address, plan.store.epoch) == ("s", "127.0.0.1:1", 7)
    assert plan.stored_tokens == 992
    assert plan.store_tier == "host"
    assert plan.cached_tokens == 0
    assert 0 < plan.predicted_ms["load"] < 100
    assert face.hints == []
    told = (await face.explain(prompt_tokens=1000, keys=keys[:31], uid="again")).candidates
    assert {c.store for c in told if not c.cached_tokens} == {"s"}
    view = await face.service.View(router_pb2.ViewRequest(), NO_CONTEXT)
    assert [(s.store.id, s.state, s.indexed_blocks) for s in view.stores] == [("s", "serving", 40)]


async def test_what_is_loaded_is_not_reserved_as_work(face: Face) -> None:
    keys = [bytes([n]) * 16 for n in range(40)]
    face.add_store("s", keys=keys)
    plan = (await face.route(prompt_tokens=1000, keys=keys[:31])).plan
    computes = plan.prefill.id or plan.worker.id
    assert face.reservations.on(computes).prefill_tokens == 8


@pytest.mark.parametrize("tier", ["device", "nvme"])
async def test_a_tier_that_nobody_reads_from_is_told_to_begin(face: Face, tier: str) -> None:
    keys = [bytes([n]) * 16 for n in range(40)]
    face.add_store("s", tier, keys=keys)
    plan = (await face.route(prompt_tokens=1000, keys=keys[:31])).plan
    assert plan.store_tier == tier
    assert face.hints == [("s", 31)]


async def test_a_block_that_can_be_read_is_not_waited_for_on_the_device(face: Face) -> None:
    keys = [bytes([n]) * 16 for n in range(40)]
    face.add_store("s", "host", keys=keys)
    face.index.apply("s", 7, 2, stored=keys, removed=(), cleared=False, tier="device")
    plan = (await face.route(prompt_tokens=1000, keys=keys[:31])).plan
    assert plan.store_tier == "host"
    assert face.hints == []


async def test_a_prompt_with_logprobs_loads_nothing(face: Face) -> None:
    keys = [bytes([n]) * 16 for n in range(40)]
    face.add_store("s", keys=keys)
    plan = (await face.route(prompt_tokens=1000, keys=keys[:31], merged_only=True)).plan
    assert not plan.HasField("store")


async def test_a_store_that_brought_nothing_is_in_no_plan_for_a_while(face: Face) -> None:
    keys = [bytes([n]) * 16 for n in range(40)]
    face.add_store("s", keys=keys)
    plan = (await face.route(uid="a", prompt_tokens=1000, keys=keys[:31])).plan
    loader = plan.prefill.id or plan.worker.id
    route = worker_pb2.RouteTaken(
        mode=plan.mode, prefill=plan.prefill.id, worker=plan.worker.id, store="s", store_tier="host", store_seconds=1.0
    )
    outcome = router_pb2.Outcome(uid="a", worker=plan.worker.id, prefill=plan.prefill.id, route=route)
    await face.service.Report(router_pb2.ReportRequest(outcomes=[outcome]), NO_CONTEXT)
    told = (await face.explain(prompt_tokens=1000, keys=keys[:31])).candidates
    by_loader = {(c.prefill or c.worker): c.store for c in told}
    assert by_loader[loader] == ""
    assert "s" in by_loader.values()


async def test_a_load_told_late_brings_nobody_back(face: Face) -> None:
    async def told(store: str, worker: str, prefill: str = "") -> None:
        mode = worker_pb2.MODE_DISAGGREGATED if prefill else worker_pb2.MODE_MERGED
        route = worker_pb2.RouteTaken(
            mode=mode, worker=worker, prefill=prefill, store=store, store_tier="host", store_seconds=0.1, store_bytes=9
        )
        outcome = router_pb2.Outcome(uid="a", route=route)
        await face.service.Report(router_pb2.ReportRequest(outcomes=[outcome]), NO_CONTEXT)

    face.add_store("s")
    await told("s", "m1")
    await told("s", "d1", "p1")
    assert len(face.loads) == 2
    for id in ("m1", "p1"):
        face.workers.registered(id, None)
        face.loads.forget(id)
    await told("s", "m1")
    await told("s", "d1", "p1")
    assert len(face.loads) == 0
    face.stores.registered("s", None)
    await told("s", "d1")
    assert len(face.loads) == 0


async def test_what_is_expected_and_what_was_refused_is_counted(face: Face) -> None:
    await face.route(keys=KEYS)
    assert face.counted("baton_router_expected_keys") == 10
    assert face.counted("baton_router_expectations_refused") == 0
    face.speculation._max_keys = 19
    await face.route(keys=[bytes([100 + n]) * 16 for n in range(10)])
    assert face.counted("baton_router_expected_keys") == 10
    assert face.counted("baton_router_expectations_refused") == 1


async def test_keys_that_are_none_are_refused(face: Face) -> None:
    reply = await face.service.Route(face.request(keys=[b"short"]), NO_CONTEXT)
    assert (reply.failure.reason, reply.failure.param) == ("INVALID_REQUEST", "keys")
    reply = await face.service.Route(face.request(packed_keys=bytes(17)), NO_CONTEXT)
    assert (reply.failure.reason, reply.failure.param) == ("INVALID_REQUEST", "packed_keys")
    assert len(face.reservations) == 0


async def test_a_prefill_on_a_core_with_streams_freezes_them_and_explain_says_so(face: Face) -> None:
    face.add("p1", PREFILL, device="cpu:0")
    face.add("m1", MERGED, device="cpu:0")
    face.reservations.take("x", 0, {"m1": Held(streams=3), "p2": Held(prefill_tokens=50)}, face.now)
    found = {(c.prefill, c.worker): c.terms_ms["stall"] for c in (await face.explain()).candidates}
    assert found["p1", "d1"] == pytest.approx(3 * 320 / 500 * 1e3)
    assert found["p2", "d1"] == 0.0
    assert (await face.route()).plan.prefill.id == "p2", "although it has a queue"


async def test_a_fleet_of_engines_says_why_it_does_not_pair(face: Face) -> None:
    """vLLM's decode beside torch's prefill: it computes alone, and both values are named."""
    for id in ("d1", "m1"):
        face.workers.registered(id, None)
    theirs = kv_pb2.Layout(
        model="weights", layers=2, kv_heads=2, head_dim=16, block_size=128, dtype="bfloat16", quantisation="none",
        order="vllm", tensor_parallel=2, pipeline_parallel=1, variant="0.32",
    )  # fmt: skip
    face.add("v1", DECODE, engine="vllm", layout=theirs, fingerprint="theirs", block_size=128)
    face.add("u1", MERGED, engine="openai", layout=None, fingerprint="", pool_blocks=0, lacks=["logprobs"])
    plan = (await face.route(exclude=["u1"])).plan
    assert (plan.mode, list(plan.reasons)) == (worker_pb2.MODE_LOCAL, ["KV_LAYOUT_MISMATCH", "LOCAL_FALLBACK"])
    found = {(c.worker, c.prefill): c.excluded for c in (await face.explain()).candidates}
    told = found["v1", "p1"]
    assert told.startswith("KV_LAYOUT_MISMATCH: p1 and v1 differ in engine: ")
    for field in (
        "block_size: 32 != 128",
        "dtype: float32 != bfloat16",
        "tensor_parallel: 1 != 2",
        "variant:  != 0.32",
    ):
        assert field in told
    assert found["u1", ""] == ""
    assert (await face.route(needs=["logprobs"])).plan.worker.id == "v1"
    found = {(c.worker, c.prefill): c.excluded for c in (await face.explain(needs=["logprobs"])).candidates}
    assert found["u1", ""] == "LACKS: u1 cannot do logprobs"
    face.workers.registered("v1", None)
    refused = (await face.route(needs=["logprobs"])).failure
    assert (refused.reason, "LACKS: u1 cannot do logprobs" in refused.message) == ("INVALID_REQUEST", True)
