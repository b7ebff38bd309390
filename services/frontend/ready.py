"""Whether a completion can be served now, and what is missing when not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from baton.errors import BatonError
from baton.model.card import card_difference
from baton.registry.registry import Registry
from baton.registry.view import View
from baton.v1 import registry_pb2, worker_pb2
from services.frontend.route import RouterClient
from services.frontend.sessions import Sessions

CLAIM_RETRY_S = 2.0

_log = structlog.get_logger()


@dataclass(frozen=True)
class Missing:
    """One part that is missing: which (`registry`, `router`, `worker`, `prefill`, `card`, `draining`), and why."""

    part: str
    why: str


class CardKeeper:
    """Keeps this frontend's model card beside the registry's: first come stands, and others must agree."""

    def __init__(self, ours: registry_pb2.ModelCard, registry: Registry) -> None:
        self._ours = ours
        self._registry = registry
        self._changed = asyncio.Event()
        self.standing: registry_pb2.ModelCard | None = None

    @property
    def difference(self) -> list[str]:
        """Fields in which the standing card differs from ours."""
        return [] if self.standing is None else card_difference(self.standing, self._ours)

    async def run(self) -> None:
        """Claim until it is known whose card stands; claim again when that one goes."""
        cards = self._registry.view("models", registry_pb2.ModelCard)
        unsubscribe = cards.subscribe(self._on_change)
        try:
            while True:
                self._changed.clear()
                try:
                    self.standing = await self._registry.claim_card(self._ours)
                except BatonError as error:
                    _log.warning("model card not claimed yet", error=str(error))
                    await asyncio.sleep(CLAIM_RETRY_S)
                    continue
                if self.difference:
                    _log.error("model card differs from the registry's", fields=self.difference)
                await self._changed.wait()
        finally:
            unsubscribe()

    def _on_change(self, name: str, card: registry_pb2.ModelCard | None) -> None:
        if name != self._ours.model:
            return
        if card is None:
            self._changed.set()
        else:
            self.standing = card


class Readiness:
    """Asks every part; cheap enough for each probe."""

    def __init__(
        self,
        model: str,
        registry: Registry,
        workers: View[registry_pb2.Worker],
        routers: View[registry_pb2.Router],
        router: RouterClient,
        sessions: Sessions,
        card: CardKeeper,
        fallback: worker_pb2.Fallback.ValueType,
    ) -> None:
        self._model = model
        self._registry = registry
        self._workers = workers
        self._routers = routers
        self._router = router
        self._sessions = sessions
        self._card = card
        self._strict = fallback == worker_pb2.FALLBACK_STRICT
        self.draining = False

    def missing(self) -> list[Missing]:
        """What a completion lacks; empty when it can be served.

        A registry that was there and went away is not missing (its last view serves); nor is a router once one has
        been known, because the frontend then places requests itself (not under strict fallback).
        """
        out: list[Missing] = []
        if self.draining:
            out.append(Missing("draining", "this frontend is shutting down"))
        if self._card.standing is None and not self._registry.state.connected:
            out.append(Missing("registry", "etcd has not answered yet"))
        elif self._card.standing is None:
            out.append(Missing("card", "the model card has not been claimed yet"))
        elif self._card.difference:
            fields = ", ".join(self._card.difference)
            out.append(Missing("card", f"VERSION_MISMATCH: our model files differ from the registry's in {fields}"))
        if not self._routers.items() and (self._strict or not self._router.answered):
            out.append(Missing("router", "no router is registered"))
        out += self._missing_workers()
        return out

    def workers(self) -> list[registry_pb2.Worker]:
        """Every worker of the model that the registry shows."""
        return [worker for worker in self._workers.items().values() if worker.model == self._model]

    def _streaming(self) -> list[registry_pb2.Worker]:
        """Decode and merged workers that would take a request now."""
        out = []
        for id, worker in self._workers.items().items():
            session = self._sessions.live().get(id)
            if session is not None and session.connected and not session.draining and not worker.draining:
                out.append(worker)
        return out

    def _missing_workers(self) -> list[Missing]:
        roles = {worker.role for worker in self._streaming()}
        if not self._strict:
            return [] if roles else [Missing("worker", f"no decode or merged worker of {self._model} is connected")]
        out = []
        if registry_pb2.ROLE_DECODE not in roles:
            out.append(Missing("worker", f"no decode worker of {self._model} is connected (strict fallback)"))
        prefills = (w for w in self._workers.items().values() if w.model == self._model and not w.draining)
        if not any(worker.role == registry_pb2.ROLE_PREFILL for worker in prefills):
            out.append(Missing("prefill", f"no prefill worker of {self._model} is registered (strict fallback)"))
        return out
