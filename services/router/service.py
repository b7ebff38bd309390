"""The router's gRPC face: Route, Explain, Report, View, CheckIntegrity."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from baton.errors import BatonError, Reason
from baton.kv.keys import BLOCK_SIZE, KEY_BYTES, split_keys
from baton.registry.registry import Registry
from baton.route import RouteReason
from baton.rpc.errors import failure
from baton.v1 import router_pb2, router_pb2_grpc, worker_pb2
from services.router import costs, explain, policy
from services.router.index import PrefixIndex
from services.router.loads import LoadRates
from services.router.metrics import RouterMetrics
from services.router.prefetch import READABLE_TIER, Prefetcher
from services.router.rates import PrefillShare, Rates
from services.router.reservations import Held, Reservations
from services.router.shortlist import Fleet
from services.router.speculation import Speculation
from services.router.stored import Load, StoredRun
from services.router.stores import KnownStore, Stores
from services.router.workers import Workers

EXPECT_S = 2.0
"""How much longer than predicted blocks may take to be announced before they are not counted on any more."""
NONE: frozenset[str] = frozenset()
"""What most requests exclude and need: making one of an empty field takes longer than looking whether it is empty."""


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """Answers from memory only: a route never waits for another process."""

    def __init__(
        self,
        workers: Workers,
        index: PrefixIndex,
        speculation: Speculation,
        reservations: Reservations,
        rates: Rates,
        shares: PrefillShare,
        stores: Stores,
        loads: LoadRates,
        prefetcher: Prefetcher,
        parameters: costs.Parameters,
        registry: Registry,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._index = index
        self._speculation = speculation
        self._reservations = reservations
        self._rates = rates
        self._shares = shares
        self._stores = stores
        self._loads = loads
        self._prefetcher = prefetcher
        self._parameters = parameters
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        metrics.index_keys.set_function(lambda: len(index))
        metrics.index_dropped.set_function(lambda: index.dropped)
        metrics.index_gaps.set_function(lambda: index.gaps)
        metrics.expected_keys.set_function(lambda: len(speculation))
        metrics.expectations_refused.set_function(lambda: speculation.refused)
        metrics.reservations.set_function(lambda: len(reservations))
        metrics.reservations_expired.set_function(lambda: reservations.expired)
        for state in ("serving", "degraded", "draining", "quarantined"):
            metrics.workers.labels(state).set_function(partial(self._in_state, state))
        for state in ("serving", "degraded", "quarantined"):
            metrics.stores.labels(state).set_function(partial(self._stores_in_state, state))

    async def Route(self, request: router_pb2.RouteRequest, context: object) -> router_pb2.RouteReply:
        """The cheapest plan, its load reserved; or the reason why there is none."""
        began = time.perf_counter()
        try:
            keys = _keys(request)
            choice, _ = self._decide(request, keys, exhaustive=False)
        except BatonError as error:
            self._metrics.refusals.labels(error.reason.name).inc()
            return router_pb2.RouteReply(failure=failure(error))
        attempt = request.attempt
        self._reserve(attempt, keys, choice.winner)
        if choice.winner.load is not None:
            self._prefetch(request, keys, choice.winner, choice.winner.load)
        reply = router_pb2.RouteReply()
        self._put_plan(reply.plan, choice, attempt)
        self._metrics.routes.add(choice.winner.mode, choice.reasons[0], time.perf_counter() - began)
        return reply

    async def Explain(self, request: router_pb2.RouteRequest, context: object) -> router_pb2.ExplainReply:
        """Every candidate's terms, cheapest first, those that may not be taken last, and the stores that no load may
        count on. Reserves nothing."""
        reply = router_pb2.ExplainReply()
        winner = None
        try:
            choice, found = self._decide(request, _keys(request), exhaustive=True)
            winner = choice.winner
            self._put_plan(reply.plan, choice, request.attempt)
        except _RefusedError as refused:
            found = refused.found
            reply.failure.CopyFrom(failure(refused))
        except BatonError as error:
            return router_pb2.ExplainReply(failure=failure(error))
        for item in sorted(found, key=lambda c: (bool(c.excluded), c.total)):
            reply.candidates.append(explain.candidate(item, winner, self._transport(item), self._why_not(item)))
        reply.excluded_stores.extend(self._store_view(one) for one in self._stores.all() if self._stores.why_not(one))
        return reply

    async def Report(self, request: router_pb2.ReportRequest, context: object) -> router_pb2.ReportReply:
        """Learn from what became of requests; take workers out whose connection failed."""
        for outcome in request.outcomes:
            for failed in outcome.failed_workers:
                self._metrics.reported_failures.inc()
                self._workers.failed(failed, f"connection failed, says a frontend ({outcome.reason or 'no reason'})")
            if not outcome.uid:
                continue
            self._reservations.end(outcome.uid, outcome.attempt)
            self._metrics.outcomes.labels(Reason.from_name(outcome.reason).name if outcome.reason else "ok").inc()
            route = outcome.route
            prefill, worker = route.prefill or outcome.prefill, route.worker or outcome.worker
            self._rates.moved(prefill, worker, route.kv_bytes, route.kv_seconds, route.transport)
            if route.store:
                self._learn_load(route, prefill if route.mode == worker_pb2.MODE_DISAGGREGATED else worker)
            if not outcome.reason:
                self._rates.answered(outcome.output_tokens)
        return router_pb2.ReportReply()

    async def View(self, request: router_pb2.ViewRequest, context: object) -> router_pb2.ViewReply:
        """What this router knows of the fleet."""
        self._reservations.expire(self._clock())
        state = self._registry.state
        reply = router_pb2.ViewReply(
            registry="connected" if state.connected else f"lost since {state.since:.0f}", indexed_keys=len(self._index)
        )
        for known in sorted(self._workers.all(), key=lambda k: k.worker.id):
            held = self._reservations.on(known.worker.id)
            reply.workers.add(
                worker=known.worker,
                load=known.load,
                state=self._workers.state(known),
                indexed_blocks=self._index.held_by(known.worker.id),
                reserved_prefill_tokens=held.prefill_tokens,
                reserved_streams=held.streams,
            )
        for one in sorted(self._stores.all(), key=lambda k: k.store.id):
            reply.stores.append(self._store_view(one))
        return reply

    async def CheckIntegrity(
        self, request: worker_pb2.CheckIntegrityRequest, context: object
    ) -> worker_pb2.CheckIntegrityReply:
        """The leak check of index and reservations."""
        self._reservations.expire(self._clock())
        return worker_pb2.CheckIntegrityReply(
            findings=self._index.check_integrity() + self._reservations.check_integrity()
        )

    def _learn_load(self, route: worker_pb2.RouteTaken, loader: str) -> None:
        """What a load took, unless one of the two is gone: nothing would forget it again."""
        if self._stores.has(route.store) and self._workers.has(loader):
            self._loads.loaded(
                route.store, route.store_tier, loader, route.store_bytes, route.store_seconds, self._clock()
            )

    def _store_view(self, known: KnownStore) -> router_pb2.StoreView:
        return router_pb2.StoreView(
            store=known.store,
            state=self._stores.state(known),
            indexed_blocks=self._index.held_by(known.store.id),
            why=self._stores.why_not(known),
        )

    def _stores_in_state(self, state: str) -> int:
        return sum(self._stores.state(known) == state for known in self._stores.all())

    def _in_state(self, state: str) -> int:
        return sum(self._workers.state(known) == state for known in self._workers.all())

    def _decide(
        self, request: router_pb2.RouteRequest, keys: bytes, *, exhaustive: bool
    ) -> tuple[policy.Choice, list[policy.Candidate]]:
        _check(request)
        now = self._clock()
        self._reservations.expire(now)
        self._speculation.expire(now)
        fleet = self._workers.fleet(request.model, now)
        if not len(fleet):
            raise self._nobody(request.model)
        hits, stored = self._held(keys, fleet)
        ask = costs.Ask(
            uid=request.uid,
            prompt_tokens=request.prompt_tokens,
            output_tokens=min(request.max_tokens or math.inf, self._rates.output_tokens),
            hits=hits,
            stored=() if request.merged_only else stored,
            exclude=frozenset(request.exclude) if request.exclude else NONE,
            merged_only=request.merged_only,
            strict=request.fallback == worker_pb2.FALLBACK_STRICT,
            ttft_slo_s=request.ttft_slo_s,
            now=now,
            needs=frozenset(request.needs) if request.needs else NONE,
        )

        def load_time(store: str, tier: str, worker: str, size: float) -> float:
            return self._loads.seconds(store, tier, worker, size, now)

        # The few are the cheapest, and those in time may be others: nobody is refused for that before all are seen.
        for everyone in (True,) if exhaustive else (False, True):
            states = fleet.all() if everyone else fleet.shortlist(ask, load_time)
            found = policy.candidates(
                states, ask, self._rates.transfer, self._parameters, exhaustive=everyone, load_time=load_time
            )
            choice = policy.choose(found, ask, self._parameters)
            if not (isinstance(choice, policy.Refusal) and choice.late):
                break
        if isinstance(choice, policy.Refusal):
            raise _RefusedError(choice, found)
        return choice, found

    def _held(self, logical: bytes, fleet: Fleet) -> tuple[dict[str, int], list[StoredRun]]:
        """Prefix-hit tokens by worker, those that are on their way included; and what stores hold."""
        hits: dict[str, int] = {}
        stored: list[StoredRun] = []
        sizes = fleet.block_sizes()
        for size in sizes:
            keys = _physical(logical, size)
            found = self._index.look_up(keys)
            for id, tiers in found.stores.items():
                if store := self._stores.usable(id):
                    stored.append(StoredRun(id, store.fingerprint, size, tiers))
            held = found.workers
            self._speculation.extend(held, keys)
            for worker, blocks in held.items():
                if len(sizes) == 1 or fleet.block_size(worker) == size:
                    hits[worker] = blocks * size
        return hits, stored

    def _prefetch(self, request: router_pb2.RouteRequest, keys: bytes, winner: policy.Candidate, load: Load) -> None:
        """Let the store begin with what it has to bring up first."""
        store = self._stores.usable(load.store)
        if store is None or load.tier == READABLE_TIER:
            return
        size = (winner.prefill or winner.worker).block_size
        wanted = split_keys(_physical(keys, size))[winner.cached_tokens // size : load.tokens // size]
        self._prefetcher.hint(store, wanted, request.tenant)

    def _why_not(self, item: policy.Candidate) -> str:
        """Why a candidate may not be taken; two layouts that differ with the fields and both values."""
        if item.prefill is None or not item.excluded.startswith(Reason.KV_LAYOUT_MISMATCH.name):
            return item.excluded
        return explain.mismatch(self._workers.get(item.prefill.id).worker, self._workers.get(item.worker.id).worker)

    def _transport(self, item: policy.Candidate) -> str:
        """By which transport the pair's last hand-over went, or, before the first, by which it should."""
        if item.prefill is None:
            return ""
        known = self._rates.transport(item.prefill.id, item.worker.id)
        decode, prefill = self._workers.get(item.worker.id).worker, self._workers.get(item.prefill.id).worker
        return known or explain.expected_transport(decode, prefill)

    def _nobody(self, model: str) -> BatonError:
        if self._workers.knows(model) or not any(self._workers.all()):
            return BatonError(Reason.DECODE_UNAVAILABLE, f"no worker for model {model!r} is registered")
        return BatonError(Reason.MODEL_NOT_FOUND, f"no worker serves model {model!r}", param="model")

    def _reserve(self, attempt: int, keys: bytes, winner: policy.Candidate) -> None:
        ask, worker, prefill, terms = winner.ask, winner.worker, winner.prefill, winner.terms
        prompt, now, cached = ask.prompt_tokens, ask.now, winner.cached_tokens
        tokens = prompt - (winner.load.tokens if winner.load else cached)
        if prefill is None:
            computes = worker
            short = tokens if tokens <= worker.short_tokens else 0.0
            parts = {worker.id: Held(tokens, 1, worker.blocks_for(prompt), short)}
        else:
            computes = prefill
            short = tokens if tokens <= prefill.short_tokens else 0.0
            parts = {
                worker.id: Held(0.0, 1, worker.blocks_for(prompt)),
                prefill.id: Held(tokens, 0, prefill.blocks_for(prompt), short),
            }
        self._reservations.take(ask.uid, attempt, parts, now)
        self._shares.add(computes.id, costs.prefill_seconds(computes, tokens), now)
        until = now + terms.queue + terms.load + terms.prefill + EXPECT_S
        size = computes.block_size
        self._speculation.expect(computes.id, _physical(keys, size), cached // size, until)

    def _put_plan(self, plan: worker_pb2.Plan, choice: policy.Choice, attempt: int) -> None:
        load = choice.winner.load
        explain.put_plan(plan, choice, self._workers.target, self._stores.usable(load.store) if load else None)
        if attempt:
            plan.reasons.append(RouteReason.REROUTED)


class _RefusedError(BatonError):
    """No plan; carries the candidates for `Explain`."""

    def __init__(self, refusal: policy.Refusal, found: list[policy.Candidate]) -> None:
        super().__init__(refusal.reason, refusal.message)
        self.found = found


def _keys(request: router_pb2.RouteRequest) -> bytes:
    """The keys of a request, side by side. Raises BatonError(INVALID_REQUEST) when one is not of `KEY_BYTES`."""
    keys = request.packed_keys
    if not keys and request.keys:  # from a client that knows no other field
        keys = b"".join(request.keys)
        if len(keys) != KEY_BYTES * len(request.keys):
            raise BatonError(Reason.INVALID_REQUEST, f"a block's key is not of {KEY_BYTES} bytes", param="keys")
    if len(keys) % KEY_BYTES:
        raise BatonError(
            Reason.INVALID_REQUEST, f"{len(keys)} bytes are no keys of {KEY_BYTES} each", param="packed_keys"
        )
    return keys


def _physical(keys: bytes, block_size: int) -> bytes:
    """The keys of a worker's blocks among the logical ones: blocks of k x 32 tokens go by every k-th."""
    factor = block_size // BLOCK_SIZE
    return keys if factor <= 1 else b"".join(split_keys(keys)[factor - 1 :: factor])


def _check(request: router_pb2.RouteRequest) -> None:
    if not request.uid:
        raise BatonError(Reason.INVALID_REQUEST, "a request needs a uid", param="uid")
    if not request.prompt_tokens:
        raise BatonError(Reason.INVALID_REQUEST, "a request needs a prompt", param="prompt_tokens")
    if request.deadline and request.deadline <= time.time():
        raise BatonError(Reason.DEADLINE_EXCEEDED, "the request's deadline has passed")
