"""Being known: the model's card claimed, this worker registered, its draining told."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from baton.errors import BatonError
from baton.model.card import card_difference
from baton.registry import Registration, Registry
from baton.v1 import registry_pb2

_log = structlog.get_logger()


class Announcement:
    """`message` is what the registry shows; `on_other_model` ends a process whose model is not the one of that name."""

    def __init__(
        self,
        registry: Registry,
        message: registry_pb2.Worker,
        on_other_model: Callable[[], None],
    ) -> None:
        self.message = message
        self._registry = registry
        self._on_other_model = on_other_model
        self._registration: Registration | None = None

    async def run(self) -> None:
        """Claim the card, then register; etcd may be away for as long as it likes. Returns when registered."""
        card = self.message.card
        standing = None
        while standing is None:
            try:
                standing = await self._registry.claim_card(card)
            except BatonError as error:
                _log.warning("the model's card is not claimed yet", message=error.message)
        differs = card_difference(card, standing)
        if differs:
            _log.error("another model is served under this name", model=card.model, differs=differs)
            self._on_other_model()
            return
        self._registration = await self._registry.register("workers", self.message.id, self.message)

    async def say_draining(self) -> None:
        """Show it in the registration; returns when etcd has it, or does not answer in time."""
        self.message.draining = True
        if self._registration is not None:
            await self._registration.update(self.message)

    async def withdraw(self) -> None:
        """Leave the registry. Idempotent."""
        if self._registration is not None:
            await self._registration.withdraw()
