"""A prompt's prefix from a store, where the router found that loading costs less than computing.

    connect, Lookup (held: the pin) -> pair -> READ into reserved slots, verify, commit -> close the Lookup

A load is only ever a shortcut. Whatever goes wrong, at whatever point, what was verified until then is kept, the rest
is computed, and the reason is counted. Its patience is what computing would take: a store that hangs at most doubles
that, once, and then rests (`Stores`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from baton.engine.port import Reservation
from baton.errors import BatonError, Reason
from baton.kv.handle import Handle
from baton.kv.keys import block_keys
from baton.rpc.codec import handle_from_pb, peer_from_pb
from baton.v1 import kvstore_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.context import WorkerContext
from baton.worker.stores import Stores

DEFAULT_PREFILL_TOK_S = 1000.0
"""Until the engine has measured its own."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class Source:
    """What a plan says of a store: who holds `tokens` of the prompt, and on which tier the slowest part."""

    target: pb.Target
    tokens: int
    tier: str
    tenant: str

    def __bool__(self) -> bool:
        return bool(self.target.address)


class StoreLoader:
    """Loads for one worker. It never raises but when it is cancelled."""

    def __init__(self, context: WorkerContext, stores: Stores) -> None:
        self._context = context
        self._stores = stores

    async def load(self, reservation: Reservation, source: Source) -> pb.StoreLoad | None:
        """Load what `source` has beyond the reservation's prefix. None when there was nothing to load or nobody to
        ask; then no time was spent. Otherwise what it brought, and why not all."""
        keys = self._wanted(reservation, source)
        if not keys:
            return None
        outcome = pb.StoreLoad(store=source.target.id, tier=source.tier)
        if self._stores.resting(source.target.id):
            self._count(outcome, "resting")
            return None
        began = time.monotonic()
        have = reservation.cached_tokens
        size = self._context.spec.block_size
        try:
            await self._fetch(reservation, source, keys, began + self._patience_s(len(keys) * size), outcome)
            self._stores.answered(source.target.id)
        except BatonError as error:
            outcome.reason = error.reason.name
            if error.reason is not Reason.NOT_FOUND:  # what it does not have any more is no failure of the store
                self._stores.failed(source.target.id, source.target.epoch)
            _log.info("store load fell short", uid=reservation.request.uid, store=source.target.id, why=str(error))
        outcome.tokens = max(0, reservation.cached_tokens - have)
        outcome.seconds = time.monotonic() - began
        self._count(outcome, outcome.reason or "ok")
        return outcome

    def _wanted(self, reservation: Reservation, source: Source) -> list[bytes]:
        """Keys of the whole blocks to load: beyond what is here, and never the last token (its logits are needed)."""
        request, size = reservation.request, self._context.spec.block_size
        prompt = [*request.prompt_ids, *request.emitted_ids]
        blocks = min(source.tokens, len(prompt) - 1) // size
        have = -(-reservation.cached_tokens // size)
        if not source or blocks <= have or request.sampling.prompt_logprobs is not None:
            return []
        return block_keys(request.key_root, prompt[: blocks * size], size)[have:]

    def _patience_s(self, tokens: int) -> float:
        """How long computing `tokens` takes here: waiting longer can only lose."""
        stats = self._context.engine.stats()
        return max(tokens / (stats.prefill_tok_s or DEFAULT_PREFILL_TOK_S), stats.decode_step_s)

    async def _fetch(
        self, reservation: Reservation, source: Source, keys: Sequence[bytes], end: float, outcome: pb.StoreLoad
    ) -> None:
        """Raises BatonError with what ended it before every key was loaded."""
        await self._stores.connected(source.target.address, _left(end))
        request = kvstore_pb2.LookupRequest(
            keys=keys, fingerprint=self._context.fingerprint, tenant=source.tenant, deadline_s=_left(end)
        )
        found = 0
        target = source.target
        async with aclosing(self._stores.lookup(target.id, target.address, request, end)) as replies:
            async for reply in replies:
                handles = [handle_from_pb(handle) for handle in reply.handles][: len(keys) - found]
                if handles:
                    await self._context.transports.pair(peer_from_pb(reply.peer), end)
                    await self._read(reservation, handles, end, outcome)
                    found += len(handles)
                if found == len(keys) or reply.complete:
                    break
        if found < len(keys):
            raise BatonError(Reason.NOT_FOUND, f"{source.target.id} has {found} of {len(keys)} blocks")

    async def _read(
        self, reservation: Reservation, handles: Sequence[Handle], end: float, outcome: pb.StoreLoad
    ) -> None:
        _left(end)
        first = -(-reservation.cached_tokens // self._context.spec.block_size)
        report = await reservation.load(first, handles, self._context.reader, end)
        outcome.bytes += report.bytes
        for block in report.blocks:
            if block.reason is not None:
                raise BatonError(block.reason, "reading KV from a store")

    def _count(self, outcome: pb.StoreLoad, result: str) -> None:
        metrics = self._context.metrics
        metrics.store_loads.labels(result).inc()
        metrics.store_loaded_tokens.inc(outcome.tokens)
        metrics.store_loaded_bytes.inc(outcome.bytes)
        metrics.store_load_seconds.inc(outcome.seconds)


def _left(end: float) -> float:
    """Seconds until `end`. Raises BatonError KV_TRANSFER_TIMEOUT when it has passed."""
    left = end - time.monotonic()
    if left <= 0:
        raise BatonError(Reason.KV_TRANSFER_TIMEOUT, "loading took as long as computing would")
    return left
