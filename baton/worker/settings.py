"""What can be set of a worker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.config import ServiceSettings


class WorkerSettings(ServiceSettings):
    """Flags of `python -m services.prefill|decode|merged`."""

    engine: Literal["torch", "vllm"] = Field(
        default="torch", description="What computes: torch, or vllm, which must be installed in this environment."
    )
    model: str = Field(description="A GGUF file or a safetensors directory; vllm takes the latter only.")
    served_name: str = Field(default="", description="The name clients ask for; empty: from the model's own name.")
    dtype: str = Field(default="bfloat16", description="bfloat16 or float32.")
    pool_gib: float = Field(default=1.0, gt=0, description="Size of the KV pool that peers read.")
    vllm_cache_gib: float = Field(default=1.0, gt=0, description="vllm: size of its own KV cache, beside the pool.")
    max_streams: int = Field(default=64, gt=0, description="Requests generating at once; more wait.")
    chunk_tokens: int = Field(default=256, gt=0, description="Prompt tokens computed in one step.")
    threads: int = Field(default=1, gt=0, description="Threads the engine computes with.")
    core: int | None = Field(default=None, ge=0, description="CPU core the engine is pinned to.")
    transports: str = Field(default="nixl,tcp", description="Which transports to offer, comma separated.")
