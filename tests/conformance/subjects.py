"""The engines under test: how the workers of each are started, and who says what the right text is."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from baton.cli.converted import as_directory
from baton.cli.home import Home
from baton.model.tokenizer import Tokenizer, load_tokenizer
from tests.etcd import EtcdServer
from tests.llama_server import MODEL, LlamaServer
from tests.oracle import oracle
from tests.vllm_environment import START_S as VLLM_START_S
from tests.vllm_environment import vllm_python
from tests.worker_process import ROOT, START_S, WorkerProcess

SERVED = "conformance"
Golden = Callable[[tuple[int, ...], int], str]


@dataclass
class Subject:
    """One engine's workers. Without prefill and decode it hands nothing over.

    `golden(prompt ids, tokens)` is the greedy text of so many tokens, end-of-text ignored, from a source that is not
    the engine. `block` is its block size in tokens.
    """

    name: str
    tokenizer: Tokenizer
    golden: Golden
    merged: WorkerProcess
    prefill: WorkerProcess | None = None
    decode: WorkerProcess | None = None
    lacks: frozenset[str] = frozenset()
    exact: bool = True
    """A resumed text is the same text."""
    whole_blocks: bool = False
    """Only whole blocks are handed over."""
    workers: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = [worker for worker in (self.merged, self.prefill, self.decode) if worker is not None]

    @property
    def hands_over(self) -> bool:
        """Whether there is KV that moves."""
        return self.prefill is not None and self.decode is not None


Start = Callable[[Path, Path], AbstractContextManager[Subject]]
"""(directory for logs, model) -> its workers, ended afterwards."""


@functools.cache
def transformers_golden(model: Path) -> Golden:
    """What transformers says in float32 of the same file; each answer is computed once, for all engines."""
    import torch

    tokenizer = load_tokenizer(model)

    @functools.cache
    def golden(prompt: tuple[int, ...], tokens: int) -> str:
        output = oracle(model).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=[],
            pad_token_id=0,
        )
        return tokenizer.decode(output[0, len(prompt) :].tolist())

    return golden


@contextlib.contextmanager
def started(
    directory: Path, roles: Mapping[str, Mapping[str, object]], limit_s: float = START_S
) -> Iterator[dict[str, WorkerProcess]]:
    """A worker of each role with these flags, and an etcd, which they need to be known."""
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(directory))
        workers = {}
        for role, flags in roles.items():
            worker = WorkerProcess(role, f"{role}-1", directory, **{"etcd": etcd.address, **flags})  # type: ignore[arg-type]
            stack.callback(worker.stop)
            workers[role] = worker
        for worker in workers.values():
            worker.wait_ready(limit_s)
        yield workers


@contextlib.contextmanager
def torch_subject(directory: Path, model: Path) -> Iterator[Subject]:
    """torch in float32 on the real model."""
    flags = {"model": model, "served_name": SERVED, "dtype": "float32", "pool_gib": 0.25, "chunk_tokens": 64}
    with started(directory, dict.fromkeys(("merged", "prefill", "decode"), flags)) as workers:
        yield Subject("torch", load_tokenizer(model), transformers_golden(model), **workers)  # type: ignore[arg-type]


@contextlib.contextmanager
def openai_subject(directory: Path, model: Path) -> Iterator[Subject]:
    """llama.cpp's server behind a merged worker."""
    server = LlamaServer(directory, model)
    server.start()
    flags = {"engine": "openai", "upstream": server.url, "model": MODEL, "tokenizer": model, "served_name": SERVED}
    flags |= {"stall_s": 60, "first_token_s": 120}  # it computes whole prompts between two tokens
    try:
        server.wait_ready()
        with started(directory, {"merged": flags}) as workers:

            @functools.cache
            def golden(prompt: tuple[int, ...], tokens: int) -> str:
                return str(server.complete(list(prompt), tokens)["choices"][0]["text"])

            yield Subject("openai", load_tokenizer(model), golden, workers["merged"])
    finally:
        server.kill()


@contextlib.contextmanager
def vllm_subject(directory: Path, model: Path) -> Iterator[Subject]:
    """vLLM in float32 on the same model, converted; in the environment that vLLM has of its own."""
    python = vllm_python()
    converted = as_directory(Home(ROOT / ".baton"), model, lambda text: None)
    flags = {
        "python": str(python),
        "engine": "vllm",
        "model": converted,
        "served_name": SERVED,
        "dtype": "float32",
        "pool_gib": 0.25,
        "vllm_cache_gib": 0.25,
        "chunk_tokens": 64,
        "core": min(os.sched_getaffinity(0)),
    }
    with started(directory, dict.fromkeys(("merged", "prefill", "decode"), flags), VLLM_START_S) as workers:
        golden = transformers_golden(model)
        yield Subject("vllm", load_tokenizer(model), golden, whole_blocks=True, **workers)  # type: ignore[arg-type]


SUBJECTS: dict[str, Start] = {"torch": torch_subject, "openai": openai_subject, "vllm": vllm_subject}
