"""Every KV store the router knows, and the stream that keeps its blocks in the index.

As for workers: one task for each, which holds its `Watch` stream and, when that breaks, puts it into quarantine and
starts over when it is due. A store that is out is in no plan: its index entries go at once, and with a new epoch
everything that the earlier process held. A stream says something as often as it promised, whether anything changes or
not: a process that is stopped, or whose loop is stuck while its connection still answers pings, is put out too, and is
in again when it speaks. A store of an earlier release promises nothing: of it the connection's pings alone tell
(baton/rpc/limits.py), within four seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
import structlog

from baton.registry.view import View
from baton.rpc.channel import Channels
from baton.rpc.patience import Patience
from baton.rpc.tasks import Background
from baton.v1 import kvstore_pb2, kvstore_pb2_grpc, registry_pb2, worker_pb2
from services.router.index import PrefixIndex
from services.router.loads import LoadRates
from services.router.quarantine import SILENT_TIMES, Quarantine

GAP_PAUSE_S = 0.1
"""Between a gap in a store's events and the new subscription."""
FIRST_TIER = "host"
"""The tier of an event that names none."""

_log = structlog.get_logger()


class StreamLostError(Exception):
    """The stream of a store ended or said something that cannot be believed."""


@dataclass
class KnownStore:
    """One store. `watched` is whether its stream stands."""

    store: registry_pb2.KvStore
    watched: bool = False
    task: asyncio.Task[None] | None = None


class Stores:
    """The stores, fed by the registry's view and by themselves."""

    def __init__(
        self,
        background: Background,
        index: PrefixIndex,
        loads: LoadRates,
        quarantine: Quarantine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._background = background
        self._index = index
        self._loads = loads
        self._quarantine = quarantine
        self._clock = clock
        self._known: dict[str, KnownStore] = {}
        self._unsubscribe: Callable[[], None] = lambda: None

    def follow(self, view: View[registry_pb2.KvStore]) -> None:
        """Mirror this view from now on."""
        self._unsubscribe = view.subscribe(self.registered)

    def registered(self, id: str, store: registry_pb2.KvStore | None) -> None:
        """The registry's word: a store came, changed or (None) is gone."""
        known = self._known.get(id)
        same = known is not None and store is not None and known.store.epoch == store.epoch
        if known is not None and store is not None and same and known.store.address == store.address:
            known.store = store
            return
        if known is not None:
            self._remove(known)
        if store is not None:
            known = self._known[id] = KnownStore(store)
            known.task = self._background.spawn(self._keep(known), f"watch {id}")

    def all(self) -> Iterable[KnownStore]:
        """Every store."""
        return self._known.values()

    def has(self, id: str) -> bool:
        """Whether the registry has it."""
        return id in self._known

    def usable(self, id: str) -> registry_pb2.KvStore | None:
        """The store of that id, when a plan may count on it."""
        known = self._known.get(id)
        return known.store if known is not None and self.state(known) == "serving" else None

    def why_not(self, known: KnownStore) -> str:
        """Why no plan may count on it; empty while it serves."""
        if why := self._quarantine.why(known.store.id):
            return f"quarantined: {why}"
        return "" if self.state(known) == "serving" else "degraded: what it holds is not known yet"

    def state(self, known: KnownStore) -> str:
        """serving, degraded or quarantined."""
        if self._quarantine.why(known.store.id):
            return "quarantined"
        return "serving" if known.watched and self._index.exact(known.store.id) else "degraded"

    def close(self) -> None:
        """Stop every stream. The background tasks' owner waits for them."""
        self._unsubscribe()
        for known in list(self._known.values()):
            self._remove(known)

    def _remove(self, known: KnownStore) -> None:
        id = known.store.id
        del self._known[id]
        if known.task is not None:
            known.task.cancel()
        self._index.forget(id)
        self._loads.forget(id)
        self._quarantine.forget(id)

    async def _keep(self, known: KnownStore) -> None:
        """Hold the store's stream for as long as it is registered."""
        id = known.store.id
        while True:
            await asyncio.sleep(max(0.0, self._quarantine.due(id) - self._clock()))
            try:
                await self._watch(known)
                await asyncio.sleep(GAP_PAUSE_S)
            except (StreamLostError, grpc.aio.AioRpcError) as error:
                why = error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self._put_out(id, why)
            except Exception as error:
                _log.exception("following a store failed", store=id)
                self._put_out(id, f"{type(error).__name__} in this router")

    def _put_out(self, id: str, why: str) -> None:
        due = self._quarantine.failed(id, why, self._clock())
        self._index.forget(id)
        _log.warning("store quarantined", store=id, why=why, again_s=round(due - self._clock(), 2))

    async def _watch(self, known: KnownStore) -> None:
        # A channel of its own: closing a shared one would cut the streams of whoever has the address next.
        channels = Channels()
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channels.get(known.store.address))
        call = stub.Watch(worker_pb2.WatchRequest())
        try:
            async with Patience(None) as patience:
                async for update in call:
                    if update.epoch != known.store.epoch:
                        raise StreamLostError("is another process than the one registered")
                    self._quarantine.answered(known.store.id)
                    known.watched = True
                    if not self._take(known, update):
                        _log.info("gap in a store's events: subscribing again", store=known.store.id)
                        return
                    patience.heard(SILENT_TIMES * update.alive_s or None)
        except TimeoutError:
            raise StreamLostError("is silent") from None
        finally:
            known.watched = False
            call.cancel()
            await channels.close()
        raise StreamLostError("ended its stream")

    def _take(self, known: KnownStore, update: kvstore_pb2.StoreUpdate) -> bool:
        """One update: its tiers' speeds, changes of what it holds. False when the events have a gap."""
        id = known.store.id
        for tier in update.tiers:
            self._loads.told(id, tier.name, tier.read_bytes_s, tier.read_latency_s)
        if not update.HasField("cache"):
            return True
        cache = update.cache
        return self._index.apply(
            id,
            update.epoch,
            cache.seq,
            stored=cache.stored,
            removed=cache.removed,
            cleared=cache.cleared,
            tier=cache.tier or FIRST_TIER,
        )
