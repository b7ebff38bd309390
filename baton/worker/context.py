"""What every part of a worker process needs to know of the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine import progress
from baton.engine.needs import GRAMMAR
from baton.engine.port import Engine, EngineSpec, Reader, Reservation
from baton.errors import BatonError, Reason
from baton.kv.handle import Handle
from baton.model.card import card_difference
from baton.rpc.channel import Channels
from baton.rpc.tasks import Background
from baton.transfer.port import ReadReport
from baton.transfer.transports import Transports
from baton.v1 import kv_pb2, registry_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics

RESERVE_S = 15.0
"""The engine answers a reservation between two steps: a long prefill chunk is the longest that may take."""


class TransportReader(Reader):
    """The engine's way to a peer's bytes: our transports, which choose the path by the handles' owner."""

    def __init__(self, transports: Transports) -> None:
        self._transports = transports

    async def read(self, handles: Sequence[Handle], into: Sequence[int], deadline: float) -> ReadReport:
        """READ and verify."""
        return await self._transports.read(handles, into, deadline)


@dataclass
class WorkerContext:
    """Built once at start. `draining` is the only thing that changes. `device` is as in the registration."""

    id: str
    role: registry_pb2.Role.ValueType
    modes: tuple[pb.Mode.ValueType, ...]
    epoch: int
    engine: Engine
    spec: EngineSpec
    transports: Transports
    peer: kv_pb2.Peer
    card: registry_pb2.ModelCard
    channels: Channels
    metrics: WorkerMetrics
    background: Background
    device: str = ""
    draining: bool = False

    @property
    def fingerprint(self) -> str:
        """Digest of our KV layout; empty without one: then nothing pairs with us."""
        return self.spec.fingerprint.digest() if self.spec.fingerprint is not None else ""

    @property
    def reader(self) -> Reader:
        """How reservations load from peers."""
        return TransportReader(self.transports)

    async def release(self, reservation: Reservation) -> None:
        """Release, also when the caller is cancelled (a second time) meanwhile."""
        await asyncio.shield(self.background.spawn(reservation.release(), "release"))

    def check_serving(self) -> None:
        """Raises BatonError DRAINING when no new work is taken."""
        if self.draining:
            raise BatonError(Reason.DRAINING, f"{self.id} is draining")

    def check_length(self, attempt: pb.Attempt) -> None:
        """Raises BatonError CONTEXT_LENGTH_EXCEEDED, before anything is done that costs the more the longer it is."""
        tokens = len(attempt.prompt_ids) + len(attempt.emitted_ids)
        if tokens >= self.spec.max_context:
            message = f"{tokens} prompt tokens leave no room in a context of {self.spec.max_context}"
            raise BatonError(Reason.CONTEXT_LENGTH_EXCEEDED, message, param="prompt_ids")

    def check_grammar(self, attempt: pb.Attempt) -> None:
        """Raises BatonError GRAMMAR_UNSUPPORTED for a grammar that the engine does not follow: a plan made in error."""
        kind = attempt.sampling.grammar.kind
        if attempt.sampling.HasField("grammar") and f"{GRAMMAR}{kind}" in self.spec.lacks:
            message = f"the engine of {self.id} ({self.spec.name}) follows no grammars of kind {kind!r}"
            raise BatonError(Reason.GRAMMAR_UNSUPPORTED, message, param="grammar")

    def stuck(self) -> bool:
        """Whether the engine has work and makes no progress."""
        stats = self.engine.stats()
        return progress.stuck(stats.step_started, stats.step_predicted_s, time.time())

    def check_moving(self, reason: Reason) -> None:
        """Raises BatonError `reason` while the engine is stuck or not well: whoever asks is better served elsewhere."""
        if unwell := self.engine.unwell:
            raise BatonError(reason, f"the engine of {self.id} is not well: {unwell}")
        if self.stuck():
            raise BatonError(reason, f"the engine of {self.id} is stuck in a step")

    def check_model(self, model: str) -> None:
        """Raises BatonError MODEL_NOT_FOUND for another model."""
        if model != self.card.model:
            raise BatonError(Reason.MODEL_NOT_FOUND, f"{self.id} serves {self.card.model}, not {model}", param="model")

    def check_card(self, card: registry_pb2.ModelCard) -> None:
        """Raises BatonError MODEL_NOT_FOUND for another model, VERSION_MISMATCH when a digest differs, naming it."""
        ours = self.card
        self.check_model(card.model)
        differ = card_difference(ours, card)
        if differ:
            raise BatonError(
                Reason.VERSION_MISMATCH, f"{', '.join(differ)} of {ours.model} differ between {self.id} and its caller"
            )


def remaining_s(deadline: float) -> float:
    """Seconds until `deadline` (unix seconds). Raises BatonError DEADLINE_EXCEEDED when it has passed."""
    left = deadline - time.time()
    if left <= 0:
        raise BatonError(Reason.DEADLINE_EXCEEDED, "the request's deadline has passed")
    return left
