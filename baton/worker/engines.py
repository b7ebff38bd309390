"""Which engine a worker runs, and the card of what it serves. Each engine's own options are read here, nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.port import Engine
from baton.model.card import load_card
from baton.process import Process
from baton.v1 import registry_pb2
from baton.worker.role import WorkerRole
from baton.worker.settings import WorkerSettings


@dataclass(frozen=True)
class Chosen:
    """An engine that has not started, and the card of its model."""

    engine: Engine
    card: registry_pb2.ModelCard


def choose_engine(process: Process, role: WorkerRole, settings: WorkerSettings) -> Chosen:
    """The engine that `settings` ask for. Raises BatonError(INVALID_REQUEST) naming the flag at fault, ModelError."""
    if settings.engine == "vllm":
        return _vllm(process, settings)
    return _torch(process, settings)


# An engine is imported where it is chosen: vLLM is not installed beside the others, and costs seconds to import.


def _torch(process: Process, settings: WorkerSettings) -> Chosen:
    from baton.engine.torch.host import TorchEngine

    engine = TorchEngine(
        settings.model,
        dtype=settings.dtype,
        arena_bytes=int(settings.pool_gib * 2**30),
        max_streams=settings.max_streams,
        chunk_tokens=settings.chunk_tokens,
        threads=settings.threads,
        core=settings.core,
        epoch=process.epoch,
        owner=process.id,
    )
    return Chosen(engine, load_card(settings.model, settings.served_name))


def _vllm(process: Process, settings: WorkerSettings) -> Chosen:
    from baton.engine.vllm.host import VllmEngine
    from baton.engine.vllm.options import VllmOptions

    options = VllmOptions(
        model=settings.model,
        dtype=settings.dtype,
        pool_bytes=int(settings.pool_gib * 2**30),
        cache_bytes=int(settings.vllm_cache_gib * 2**30),
        max_streams=settings.max_streams,
        chunk_tokens=settings.chunk_tokens,
        core=settings.core,
    )
    return Chosen(
        VllmEngine(options, epoch=process.epoch, owner=process.id), load_card(settings.model, settings.served_name)
    )
