"""Starting vLLM, and what it then is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.engine.admission import MAX_LOGPROBS
from baton.engine.needs import EMBEDDINGS, lacked_grammars
from baton.engine.port import EngineSpec, Resume
from baton.engine.vllm import messages as m
from baton.engine.vllm.options import VllmOptions
from baton.errors import BatonError, Reason
from baton.kv.keys import BLOCK_SIZE
from baton.kv.layout import DTYPE_BYTES, LayoutFingerprint
from baton.model.files import open_model
from baton.model.generation import load_generation
from baton.model.identity import weights_identity

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # our stdout says one line: ready
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # its own sockets, between its processes on this machine
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC's threads do not survive a fork
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # takes no logits processors
    "HF_HUB_OFFLINE": "1",
    # Eager all through: the first request for log probabilities compiled a kernel for seconds, and was given up.
    "TORCH_COMPILE_DISABLE": "1",
}
"""Defaults: what is set outside stands."""


def build(options: VllmOptions, path: str) -> AsyncLLM:
    """Start vLLM and wait until it serves (half a minute). Raises whatever vLLM raises, BatonError(ENGINE_FAILED) for a
    model that is no directory.

    `path`: where its processes find us.
    """
    if not Path(options.model).is_dir():
        message = f"vLLM takes a safetensors directory, not {options.model}: `baton model convert` makes one of a GGUF"
        raise BatonError(Reason.ENGINE_FAILED, message)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.core is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(options.core)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only; `kv_cache_memory_bytes` below

    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from baton.engine.vllm.connector import PATH
    from baton.engine.vllm.executor import CORE, OneCoreExecutor

    one_core = current_platform.is_cpu() and options.core is not None and options.tensor_parallel == 1
    if one_core:
        os.environ["OMP_NUM_THREADS"] = "1"

    arguments = AsyncEngineArgs(
        model=options.model,
        tokenizer=options.model,
        skip_tokenizer_init=True,  # text is the frontend's
        dtype=options.dtype,
        max_model_len=-1,  # as much as fits into its cache
        max_num_seqs=options.max_streams,
        max_num_batched_tokens=max(options.chunk_tokens, options.max_streams),
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=options.cache_bytes,
        tensor_parallel_size=options.tensor_parallel,
        distributed_executor_backend=OneCoreExecutor if one_core else None,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_logprobs=MAX_LOGPROBS,
        generation_config="vllm",  # defaults come with the request
        disable_log_stats=True,
        logits_processors=["baton.engine.vllm.sampling:BatonSampler"],
        kv_transfer_config=KVTransferConfig(
            kv_connector="BatonConnector",
            kv_connector_module_path="baton.engine.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={PATH: path, CORE: options.core},
        ),
    )
    return AsyncLLM.from_engine_args(arguments)


def describe(options: VllmOptions, llm: AsyncLLM, ranks: Sequence[m.Rank], arena_bytes: int) -> EngineSpec:
    """What has started. Raises BatonError(ENGINE_FAILED): its KV is of a kind that is not handed over."""
    model, parallel, cache = llm.vllm_config.model_config, llm.vllm_config.parallel_config, llm.vllm_config.cache_config
    if len(ranks) != parallel.world_size:
        raise BatonError(
            Reason.ENGINE_FAILED, f"{len(ranks)} of vLLM's {parallel.world_size} ranks have told of their KV"
        )
    rank = ranks[0]
    layout = LayoutFingerprint(
        model=weights_identity(options.model),
        layers=rank.layers,
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        block_size=cache.block_size,
        dtype=rank.dtype if rank.dtype in DTYPE_BYTES else options.dtype,
        order=f"vllm/{rank.order}",
        tensor_parallel=parallel.world_size,
    )
    if rank.dtype not in DTYPE_BYTES or rank.block_bytes * len(ranks) != layout.block_bytes or model.use_mla:
        message = f"a KV block of {rank.layers} layers of {rank.shape} ({rank.dtype}) is no plain K and V of every head"
        raise BatonError(Reason.ENGINE_FAILED, f"{message}: such KV is not handed over")
    pool = arena_bytes // layout.block_bytes
    files = open_model(options.model)
    configured = files.config.get("eos_token_id")
    ends = configured if isinstance(configured, list) else [configured]
    return EngineSpec(
        name="vllm",
        fingerprint=layout,
        block_size=layout.block_size,
        max_context=min(model.max_model_len, pool * layout.block_size),
        max_streams=options.max_streams,
        pool_blocks=pool,
        vocab_size=model.get_vocab_size(),
        resume=Resume.TEXT,
        eos_token_ids=tuple(sorted({*load_generation(files).eos_ids, *(e for e in ends if isinstance(e, int))})),
        partial_blocks=False,
        lacks=lacked_grammars(()) | {EMBEDDINGS},
    )
