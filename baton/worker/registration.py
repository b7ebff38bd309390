"""What a worker says of itself to the registry."""

from __future__ import annotations

import os
import time
from importlib.metadata import version

from baton.rpc.codec import layout_to_pb
from baton.transfer.transports import HOST_KEY
from baton.v1 import registry_pb2
from baton.worker.context import WorkerContext

WIRE_VERSION = 1
TRANSFER_BYTES_S = 1e9
"""Until the router has learnt better: what a plain TCP path within a rack gives."""


def worker_message(
    context: WorkerContext, *, address: str, metrics_url: str, rates: registry_pb2.Rates
) -> registry_pb2.Worker:
    """The registration of this process."""
    spec = context.spec
    return registry_pb2.Worker(
        id=context.id,
        epoch=context.epoch,
        role=context.role,
        address=address,
        metrics_url=metrics_url,
        host=context.peer.host,
        model=context.card.model,
        layout=layout_to_pb(spec.fingerprint) if spec.fingerprint is not None else None,
        fingerprint=context.fingerprint,
        card=context.card,
        block_size=spec.block_size,
        max_context=spec.max_context,
        max_streams=spec.max_streams,
        pool_blocks=spec.pool_blocks,
        engine=spec.name,
        resume=spec.resume.value,
        rates=rates,
        draining=context.draining,
        wire_version=WIRE_VERSION,
        release=version("baton"),
        transports=sorted(set(context.peer.metadata) - {HOST_KEY}),
        started=time.time(),
        pid=os.getpid(),
        device=context.device,
        yields=spec.yields,
        chunk_tokens=spec.chunk_tokens,
        short_tokens=spec.short_tokens,
        lacks=sorted(spec.lacks),
    )
