"""What can be set of a worker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.config import ServiceSettings


class WorkerSettings(ServiceSettings):
    """Flags of `python -m services.prefill|decode|merged`."""

    engine: Literal["torch", "vllm", "openai"] = Field(
        default="torch",
        description="What computes: torch in this process's child; vllm, which must be installed in this environment; "
        "or openai: a server at --upstream.",
    )
    model: str = Field(
        description="A GGUF file or a safetensors directory (vllm takes the latter only); with --engine openai, what "
        "the upstream calls its model."
    )
    served_name: str = Field(default="", description="The name clients ask for; empty: from the model's own name.")
    dtype: str = Field(default="bfloat16", description="bfloat16 or float32.")
    pool_gib: float = Field(default=1.0, gt=0, description="Size of the KV pool that peers read.")
    vllm_cache_gib: float = Field(default=1.0, gt=0, description="vllm: size of its own KV cache, beside the pool.")
    vllm_tensor_parallel: int = Field(default=1, gt=0, description="vllm: devices that share one copy of the model.")
    max_streams: int = Field(default=64, gt=0, description="Requests generating at once; more wait.")
    chunk_tokens: int = Field(default=256, gt=0, description="Prompt tokens computed in one step.")
    threads: int = Field(default=1, gt=0, description="Threads the engine computes with.")
    core: int | None = Field(default=None, ge=0, description="CPU core the engine is pinned to.")
    transports: str = Field(default="nixl,tcp", description="Which transports to offer, comma separated.")

    upstream: str = Field(default="", description="URL of an OpenAI-compatible server, as http://host:8000/v1.")
    tokenizer: str = Field(
        default="", description="Model directory or GGUF file of the upstream's model: tokenizer, template, defaults."
    )
    api_key_file: str = Field(default="", description="A file with the upstream's API key; empty: it needs none.")
    dialect: Literal["auto", "openai", "vllm", "sglang", "llama.cpp", "tensorrt-llm", "triton", "tgi", "mindie"] = (
        Field(default="auto", description="Which server the upstream is: it decides what a request may ask of it.")
    )
    prompts: Literal["auto", "tokens", "text"] = Field(
        default="auto", description="How prompts go to the upstream; auto: token ids where it takes them."
    )
    max_context: int = Field(
        default=0,
        ge=0,
        description="Longest prompt and output of the upstream; 0: what it tells, or the model's files.",
    )
    first_token_s: float = Field(default=60.0, gt=0, description="How long the upstream may take to a first token.")
    stall_s: float = Field(default=10.0, gt=0, description="How long the upstream may be silent in mid-stream.")
    start_s: float = Field(default=300.0, gt=0, description="How long to wait for the upstream at start.")
