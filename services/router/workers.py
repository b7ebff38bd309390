"""Every worker the router knows, what state each is in, and the stream that keeps it known.

One task for each worker: `Describe` it, hold its `Watch` stream, and when that breaks put it into quarantine and start
over when it is due. So the probe that brings a worker back is the very thing it is needed for.
States: `serving`; `degraded` (usable, but its stream is not established: no prefix hits, registered rates);
`draining`; `quarantined`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import grpc
import structlog

from baton.registry.view import View
from baton.rpc.channel import Channels
from baton.rpc.codec import layout_from_pb
from baton.rpc.patience import Patience
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, worker_pb2, worker_pb2_grpc
from services.router.costs import Parameters, Role, Told, WorkerState
from services.router.index import PrefixIndex
from services.router.quarantine import SILENT_TIMES, Quarantine
from services.router.rates import PrefillShare, Rates
from services.router.reservations import Reservations
from services.router.shortlist import Fleet
from services.router.speculation import Speculation

PROBE_S = 2.0
"""How long a worker may take to answer `Describe`."""
GAP_PAUSE_S = 0.1
"""Between a gap in a worker's events and the new subscription."""

_ROLES = {
    registry_pb2.ROLE_PREFILL: Role.PREFILL,
    registry_pb2.ROLE_DECODE: Role.DECODE,
    registry_pb2.ROLE_MERGED: Role.MERGED,
}
_CARD_FIELDS = ("weights", "tokenizer", "chat_template", "generation_config")

_log = structlog.get_logger()


class WatchLostError(Exception):
    """The stream of a worker ended or said something that cannot be believed."""


@dataclass
class Known:
    """One worker. `load` is its last report, of `reported_at`; `watched` is whether its stream stands; `target` is it
    in plans, `seen` it as the policy sees it, None when something of it but the reservations has changed since, and
    `told` what reservations are added to."""

    worker: registry_pb2.Worker
    load: worker_pb2.Load = field(default_factory=worker_pb2.Load)
    reported_at: float = 0.0
    watched: bool = False
    card_mismatch: str = ""
    block_bytes: int = 0
    target: worker_pb2.Target = field(default_factory=worker_pb2.Target)
    seen: WorkerState | None = None
    told: Told = field(default_factory=lambda: Told(0, 0.0, 0.0, 0, 0.0))
    task: asyncio.Task[None] | None = None


def card_differences(theirs: registry_pb2.ModelCard, standing: registry_pb2.ModelCard) -> list[str]:
    """Names of the digests in which two cards of a model differ; what either leaves empty is not compared."""
    return [
        name
        for name in _CARD_FIELDS
        if getattr(theirs, name) and getattr(standing, name) and getattr(theirs, name) != getattr(standing, name)
    ]


class Workers:
    """The fleet, fed by the registry's view and by the workers themselves."""

    def __init__(
        self,
        background: Background,
        index: PrefixIndex,
        reservations: Reservations,
        rates: Rates,
        shares: PrefillShare,
        quarantine: Quarantine,
        speculation: Speculation,
        parameters: Parameters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._background = background
        self._index = index
        self._reservations = reservations
        self._rates = rates
        self._shares = shares
        self._quarantine = quarantine
        self._speculation = speculation
        self._clock = clock
        self._known: dict[str, Known] = {}
        self._by_model: defaultdict[str, dict[str, Known]] = defaultdict(dict)
        self._cards: dict[str, registry_pb2.ModelCard] = {}
        self._fleets: defaultdict[str, Fleet] = defaultdict(partial(Fleet, parameters))
        self._nobody = Fleet(parameters)
        self._changed: set[str] = set()
        self._unsubscribe: list[Callable[[], None]] = []

    def follow(self, workers: View[registry_pb2.Worker], cards: View[registry_pb2.ModelCard]) -> None:
        """Mirror these views from now on."""
        self._unsubscribe = [workers.subscribe(self.registered), cards.subscribe(self.card_stands)]

    async def answers(self, worker: registry_pb2.Worker) -> bool:
        """Whether the very process of this registration answers: asked before a vanished entry is believed gone."""
        channels = Channels()
        try:
            return (await _describe(channels, worker.address)).epoch == worker.epoch
        except grpc.aio.AioRpcError:
            return False
        finally:
            await channels.close()

    def registered(self, id: str, worker: registry_pb2.Worker | None) -> None:
        """The registry's word: a worker came, changed or (None) is gone."""
        known = self._known.get(id)
        if worker is None:
            if known is not None:
                self._remove(known)
            return
        if worker.role not in _ROLES:
            _log.warning("worker of unknown role ignored", worker=id, role=worker.role)
            return
        if known is not None and known.worker.epoch == worker.epoch and known.worker.address == worker.address:
            self._adopt(known, worker)
            return
        if known is not None:
            self._remove(known)
        known = self._known[id] = Known(worker)
        self._adopt(known, worker)
        self._restart(known)

    def card_stands(self, model: str, card: registry_pb2.ModelCard | None) -> None:
        """The registry's word on which card stands for a served name."""
        if card is None:
            self._cards.pop(model, None)
        else:
            self._cards[model] = card
        self._judge_cards(model)

    def failed(self, id: str, why: str) -> None:
        """A connection to the worker failed, here or at a frontend: out at once, asked again soon."""
        known = self._known.get(id)
        if known is not None and not self._quarantine.why(id):
            self._put_out(known, why)
            self._restart(known)

    def knows(self, model: str) -> bool:
        """Whether anything says that this model is served here: a worker or a card."""
        return bool(self._by_model.get(model)) or model in self._cards

    def of_model(self, model: str) -> Iterable[Known]:
        """The workers that serve `model`."""
        return self._by_model.get(model, {}).values()

    def all(self) -> Iterable[Known]:
        """Every worker."""
        return self._known.values()

    def has(self, id: str) -> bool:
        """Whether the registry has it."""
        return id in self._known

    def get(self, id: str) -> Known:
        """The worker of that id. Raises KeyError."""
        return self._known[id]

    def target(self, id: str) -> worker_pb2.Target:
        """The worker as plans name it (do not change it). Raises KeyError."""
        return self._known[id].target

    def state(self, known: Known) -> str:
        """serving, degraded, draining or quarantined."""
        if self._quarantine.why(known.worker.id):
            return "quarantined"
        if known.worker.draining or known.load.draining:
            return "draining"
        return "serving" if known.watched and self._index.exact(known.worker.id) else "degraded"

    def fleet(self, model: str, now: float) -> Fleet:
        """The workers of `model` as the policy sees them. Only those are looked at anew of which something was heard
        or reserved since the last time; so `prefill_share` is as old as the last load report."""
        for id in self._changed | self._reservations.changed():
            if known := self._known.get(id):
                self._look_again(known, now)
        self._changed.clear()
        return self._fleets[model] if model in self._by_model else self._nobody

    def _stale(self, known: Known) -> None:
        """Something of it has changed, its reservations aside."""
        known.seen = None
        self._changed.add(known.worker.id)

    def _look_again(self, known: Known, now: float) -> None:
        self._fleets[known.worker.model].put(self.snapshot(known, now))

    def snapshot(self, known: Known, now: float) -> WorkerState:
        """The worker as the policy sees it: its last report with the reservations added."""
        seen = known.seen
        if seen is None:
            seen = known.seen = self._read(known)
            known.told = Told(seen.streams, seen.queued_tokens, seen.queued_short, seen.blocks_free, seen.as_of)
        held = self._reservations.on(seen.id)
        share = self._shares.of(seen.id, now)
        seen.promise(known.told, held, share, now)
        return seen

    def _read(self, known: Known) -> WorkerState:
        worker, load = known.worker, known.load
        speed = self._rates.speed(worker.id)
        return WorkerState(
            id=worker.id,
            role=_ROLES[worker.role],
            fingerprint=worker.fingerprint,
            block_size=worker.block_size or 1,
            block_bytes=known.block_bytes,
            max_context=worker.max_context,
            max_streams=worker.max_streams or 1,
            streams=load.running + load.waiting,
            queued_tokens=load.queued_prefill_tokens,
            queued_short=load.queued_short_tokens,
            blocks_total=load.blocks_total or worker.pool_blocks,
            blocks_free=load.blocks_free if load.blocks_total else worker.pool_blocks,
            prefill_tok_s=speed.prefill_tok_s,
            step_s=speed.steps.lone_s,
            stream_s=speed.steps.stream_s,
            unusable=self._unusable(known),
            device=f"{worker.host}/{worker.device}" if worker.device else "",
            as_of=known.reported_at,
            lacks=frozenset(worker.lacks),
            chunk_tokens=worker.chunk_tokens,
            short_tokens=worker.short_tokens,
        )

    def close(self) -> None:
        """Stop every stream. The background tasks' owner waits for them."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        for known in list(self._known.values()):
            self._remove(known)

    def _unusable(self, known: Known) -> str:
        id = known.worker.id
        why = self._quarantine.why(id)
        if why:
            return f"QUARANTINED: {id}: {why}"
        if known.worker.draining or known.load.draining:
            return f"DRAINING: {id}"
        if known.card_mismatch:
            return f"VERSION_MISMATCH: {id}: {known.card_mismatch}"
        return ""

    def _adopt(self, known: Known, worker: registry_pb2.Worker) -> None:
        """Take what the worker says of itself (by registration or `Describe`)."""
        if worker.model != known.worker.model:
            self._by_model[known.worker.model].pop(worker.id, None)
            self._fleets[known.worker.model].remove(worker.id)
        known.worker = worker
        self._stale(known)
        known.block_bytes = _block_bytes(worker)
        known.target = worker_pb2.Target(id=worker.id, address=worker.address, epoch=worker.epoch)
        self._by_model[worker.model][worker.id] = known
        rates = worker.rates
        self._rates.register(
            worker.id, rates.prefill_tok_s, rates.decode_step_s, rates.transfer_bytes_s, worker.max_streams
        )
        self._judge_cards(worker.model)

    def _judge_cards(self, model: str) -> None:
        """Without a card in the registry the longest-lived worker's stands."""
        fleet = [known for known in self.of_model(model) if known.worker.HasField("card")]
        if not fleet:
            return
        standing = self._cards.get(model) or min(fleet, key=lambda k: (k.worker.started, k.worker.id)).worker.card
        for known in fleet:
            names = card_differences(known.worker.card, standing)
            known.card_mismatch = f"{', '.join(names)} differ from the card of {model}" if names else ""
            self._stale(known)

    def _remove(self, known: Known) -> None:
        id = known.worker.id
        del self._known[id]
        fleet = self._by_model[known.worker.model]
        fleet.pop(id, None)
        self._fleets[known.worker.model].remove(id)
        if not fleet:
            del self._by_model[known.worker.model]
            del self._fleets[known.worker.model]
        if known.task is not None:
            known.task.cancel()
        self._forget_state(id)
        self._rates.forget(id)
        self._shares.forget(id)
        self._quarantine.forget(id)

    def _put_out(self, known: Known, why: str) -> None:
        id = known.worker.id
        due = self._quarantine.failed(id, why, self._clock())
        known.watched = False
        self._stale(known)
        self._forget_state(id)
        _log.warning("worker quarantined", worker=id, why=why, again_s=round(due - self._clock(), 2))

    def _forget_state(self, id: str) -> None:
        """What the process held, or was going to, is not there any more."""
        self._index.forget(id)
        self._speculation.forget(id)
        self._reservations.forget(id)

    def _restart(self, known: Known) -> None:
        if known.task is not None:
            known.task.cancel()
        known.task = self._background.spawn(self._keep(known), f"watch {known.worker.id}")

    async def _keep(self, known: Known) -> None:
        """Hold the worker's stream for as long as it is registered."""
        while True:
            await asyncio.sleep(max(0.0, self._quarantine.due(known.worker.id) - self._clock()))
            try:
                await self._hold(known)
                await asyncio.sleep(GAP_PAUSE_S)
            except (WatchLostError, grpc.aio.AioRpcError) as error:
                why = error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self._put_out(known, why)
            except Exception as error:
                _log.exception("following a worker failed", worker=known.worker.id)
                self._put_out(known, f"{type(error).__name__} in this router")

    async def _hold(self, known: Known) -> None:
        # A channel of its own: closing a shared one would cut the streams of whoever has the address next.
        channels = Channels()
        try:
            await self._watch(known, channels)
        finally:
            known.watched = False
            await channels.close()

    async def _watch(self, known: Known, channels: Channels) -> None:
        described = await _describe(channels, known.worker.address)
        if described.id != known.worker.id:
            raise WatchLostError(f"{described.id} answers at {known.worker.address}")
        if described.role not in _ROLES:
            raise WatchLostError(f"is of role {described.role}, which is not known here")
        if described.epoch != known.worker.epoch:
            self._forget_state(described.id)
        self._adopt(known, described)
        self._quarantine.answered(described.id)
        self._stale(known)
        stub = worker_pb2_grpc.WorkerServiceStub(channels.get(known.worker.address))
        call = stub.Watch(worker_pb2.WatchRequest())
        try:
            async with Patience(None) as patience:
                async for update in call:
                    if update.epoch != described.epoch:
                        raise WatchLostError("restarted")
                    known.watched = True
                    if not self._take(known, update):
                        _log.info("gap in a worker's events: subscribing again", worker=described.id)
                        return
                    patience.heard(SILENT_TIMES * known.load.alive_s or None)
        except TimeoutError:
            raise WatchLostError("is silent") from None
        finally:
            call.cancel()
        raise WatchLostError("ended its stream")

    def _take(self, known: Known, update: worker_pb2.WorkerUpdate) -> bool:
        """One update: load, reservations that end with it, cache changes. False when the events have a gap."""
        id = known.worker.id
        if update.HasField("load"):
            load, known.reported_at = update.load, self._clock()
            known.load = load
            self._rates.reported(id, load.prefill_tok_s, load.decode_step_s, load.running, known.reported_at)
            for uid in load.admitted:
                self._reservations.admitted(id, uid)
            known.seen = None
            self._look_again(known, known.reported_at)
        if not update.HasField("cache"):
            return True
        cache = update.cache
        return self._index.apply(
            id, update.epoch, cache.seq, stored=cache.stored, removed=cache.removed, cleared=cache.cleared
        )


def _block_bytes(worker: registry_pb2.Worker) -> int:
    """Bytes of one block; 0 when the worker has no layout (an upstream engine) or one that only newer releases know."""
    try:
        return layout_from_pb(worker.layout).block_bytes if worker.HasField("layout") else 0
    except KeyError:
        _log.warning("size of a worker's blocks is not known", worker=worker.id, dtype=worker.layout.dtype)
        return 0


async def _describe(channels: Channels, address: str) -> registry_pb2.Worker:
    stub = worker_pb2_grpc.WorkerServiceStub(channels.get(address))
    return await stub.Describe(worker_pb2.DescribeRequest(), timeout=PROBE_S)
