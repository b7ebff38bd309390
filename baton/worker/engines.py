"""Which engine a worker runs, and the card of what it serves. Each engine's own options are read here, nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.engine.port import Engine
from baton.errors import BatonError, Reason
from baton.model.card import load_card, load_model
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
    if settings.engine == "openai":
        return _openai(role, settings)
    return _torch(process, settings)


# An engine is imported where it is chosen: the environment of one need not have what another needs.


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
        tensor_parallel=settings.vllm_tensor_parallel,
    )
    return Chosen(
        VllmEngine(options, epoch=process.epoch, owner=process.id), load_card(settings.model, settings.served_name)
    )


def _openai(role: WorkerRole, settings: WorkerSettings) -> Chosen:
    """Which weights an upstream runs is not ours to know, so its card does not say."""
    from baton.engine.openai.engine import OpenAIEngine
    from baton.engine.openai.options import UpstreamOptions

    if role.name != "merged":
        raise BatonError(Reason.INVALID_REQUEST, f"--engine openai: an upstream runs merged only, not {role.name}")
    for flag, value in (("--upstream", settings.upstream), ("--tokenizer", settings.tokenizer)):
        if not value:
            raise BatonError(Reason.INVALID_REQUEST, f"--engine openai needs {flag}", param=flag)
    model = load_model(settings.tokenizer, settings.served_name or settings.model, weights=False)
    options = UpstreamOptions(
        url=settings.upstream,
        model=settings.model,
        api_key=_api_key(settings.api_key_file),
        dialect=settings.dialect,
        prompts=settings.prompts,
        max_context=settings.max_context,
        max_streams=settings.max_streams,
        first_s=settings.first_token_s,
        stall_s=settings.stall_s,
        start_s=settings.start_s,
    )
    return Chosen(OpenAIEngine(options, model), model.card)


def _api_key(path: str) -> str:
    if not path:
        return ""
    try:
        key = Path(path).expanduser().read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise BatonError(Reason.INVALID_REQUEST, f"--api-key-file: {error}", param="api_key_file") from None
    if not key or any(not character.isprintable() for character in key):
        raise BatonError(Reason.INVALID_REQUEST, f"--api-key-file: {path} holds no key", param="api_key_file")
    return key
