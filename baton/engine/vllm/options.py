"""What a vLLM engine is told. Apart from the engine, so that reading it loads nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VllmOptions:
    """`model` is a safetensors directory. `pool_bytes` is the staging pool that peers read, `cache_bytes` vLLM's own KV
    cache. `core`: the CPU core that the engine computes on; None leaves it to vLLM."""

    model: str
    dtype: str = "bfloat16"
    pool_bytes: int = 2**30
    cache_bytes: int = 2**30
    max_streams: int = 64
    chunk_tokens: int = 256
    core: int | None = None
    tensor_parallel: int = 1
