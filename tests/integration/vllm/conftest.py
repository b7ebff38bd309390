"""Real vLLM workers, in the environment that vLLM has of its own: one prefill, one decode and a prefill to kill."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.etcd import EtcdServer
from tests.tiny_model import make_tiny_model
from tests.vllm_environment import START_S, vllm_python
from tests.worker_process import WorkerProcess, settle


@dataclass
class VllmFleet:
    """Three processes for the whole module: each takes half a minute to start."""

    prefill: WorkerProcess
    decode: WorkerProcess
    spare: WorkerProcess
    model: Path
    etcd: str


@pytest.fixture(scope="package")
def vllm_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmFleet]:
    """Started side by side; not there without vLLM's environment."""
    python = vllm_python()
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=256)
    directory = tmp_path_factory.mktemp("vllm")
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(tmp_path_factory.mktemp("etcd")))

        def worker(role: str, id: str, core: int) -> WorkerProcess:
            made = WorkerProcess(
                role,
                id,
                directory,
                python=str(python),
                engine="vllm",
                model=model,
                served_name="tiny",
                dtype="float32",
                pool_gib=0.06,
                vllm_cache_gib=0.06,
                chunk_tokens=64,
                max_streams=16,
                core=core,
                etcd=etcd.address,
            )
            stack.callback(made.stop)
            return made

        cores = sorted(os.sched_getaffinity(0))
        started = [
            worker("prefill", "prefill-vllm", cores[0]),
            worker("decode", "decode-vllm", cores[-1]),
            worker("prefill", "prefill-vllm-spare", cores[0]),
        ]
        for process in started:
            process.wait_ready(START_S)
        yield VllmFleet(*started, model, etcd.address)


@pytest.fixture
async def fleet(vllm_processes: VllmFleet) -> AsyncIterator[VllmFleet]:
    """The package's processes, clean after each test. One that a test has killed is left out."""
    yield vllm_processes
    every = (vllm_processes.prefill, vllm_processes.decode, vllm_processes.spare)
    await settle(*(worker for worker in every if worker.process.poll() is None))
