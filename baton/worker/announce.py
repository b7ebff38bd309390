"""Being known: the model's card and the layout of its KV claimed, this worker registered, its draining told.

What stands is what the first process claimed, for as long as one lives that claimed it:

    card      of the served name, whoever serves it. A worker whose model is not the one of that name ends.
    layout    of the served name and the engine, of those who hand KV over. A prefill or decode worker whose KV lies
              otherwise (block size, dtype, tensor parallel, an engine's version...) could pair with none of them, so it
              ends. Another engine has a layout of its own and stands beside, unpaired; merged workers need no pair.

An engine that does not know which weights it runs (an upstream) has no whole card to claim: it compares and lets stand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from baton.errors import BatonError
from baton.model.card import card_difference
from baton.registry import Registration, Registry
from baton.rpc.codec import layout_from_pb
from baton.v1 import registry_pb2

PAIRING_ROLES = (registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE)
SYNC_S = 10.0

T = TypeVar("T")
_log = structlog.get_logger()


class Announcement:
    """`message` is what the registry shows; `refused` ends a process that may not serve beside those that are there."""

    def __init__(
        self,
        registry: Registry,
        message: registry_pb2.Worker,
        refused: Callable[[], None],
    ) -> None:
        self.message = message
        self._registry = registry
        self._refused = refused
        self._registration: Registration | None = None

    async def run(self) -> None:
        """Claim, then register; etcd may be away for as long as it likes. Returns when registered, or refused."""
        message = self.message
        card = await self._standing_card()
        differs = card_difference(message.card, card) if card is not None else []
        if differs:
            _log.error("another model is served under this name", model=message.model, differs=differs)
            self._refused()
            return
        if message.role in PAIRING_ROLES and message.HasField("layout"):
            ours = registry_pb2.StandingLayout(model=message.model, engine=message.engine, layout=message.layout)
            standing = await _until_known(lambda: self._registry.claim_layout(ours))
            differs = layout_difference(ours, standing)
            if differs:
                _log.error(
                    "KV_LAYOUT_MISMATCH: the KV of this model's prefill and decode workers lies otherwise",
                    model=message.model,
                    engine=message.engine,
                    ours_and_theirs=differs,
                )
                self._refused()
                return
        self._registration = await self._registry.register("workers", message.id, message)

    async def _standing_card(self) -> registry_pb2.ModelCard | None:
        """The card to agree with; None when nobody has claimed one and ours is not whole."""
        card = self.message.card
        if card.weights:
            return await _until_known(lambda: self._registry.claim_card(card))
        cards = self._registry.view("models", registry_pb2.ModelCard)
        while not await cards.synced(SYNC_S):
            _log.warning("the model's card is not known yet")
        return cards.items().get(card.model)

    async def say_draining(self) -> None:
        """Show it in the registration; returns when etcd has it, or does not answer in time."""
        self.message.draining = True
        if self._registration is not None:
            await self._registration.update(self.message)

    async def withdraw(self) -> None:
        """Leave the registry. Idempotent."""
        if self._registration is not None:
            await self._registration.withdraw()


def layout_difference(ours: registry_pb2.StandingLayout, standing: registry_pb2.StandingLayout) -> list[str]:
    """`field: ours != theirs` for each field in which the KV lies otherwise; empty when the two pair."""
    return layout_from_pb(ours.layout).differences(layout_from_pb(standing.layout))


CLAIM_AGAIN_S = 1.0


async def _until_known(claim: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await claim()
        except BatonError as error:
            _log.warning("not claimed yet", message=error.message)
            await asyncio.sleep(CLAIM_AGAIN_S)
