"""One Baton on a tiny model for all trigger tests, clean before and after each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.stack import Stack
from tests.scripted_prefill import ScriptedPrefill, scripted_prefill
from tests.tiny_model import make_tiny_model
from tests.worker_process import WorkerProcess, settle

CONTEXT = 2048

Oracle = Callable[[list[int], int], list[int]]


@dataclass(frozen=True)
class Fleet:
    """Two prefills, one decode, one merged, with router, store and frontends (`frontend`, `strict`) around them."""

    stack: Stack
    prefill: WorkerProcess
    alternate: WorkerProcess
    decode: WorkerProcess
    merged: WorkerProcess


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=CONTEXT)


@pytest.fixture(scope="session")
def greedy(tiny: Path) -> Oracle:
    """What transformers in f32 generates greedily, end-of-text ignored."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()

    def generate(prompt: list[int], tokens: int) -> list[int]:
        found: list[int] = []
        with torch.inference_mode():
            output = model(torch.tensor([prompt]), use_cache=True)
            while True:
                found.append(int(output.logits[0, -1].argmax()))
                if len(found) == tokens:
                    return found
                output = model(torch.tensor([[found[-1]]]), past_key_values=output.past_key_values, use_cache=True)

    return generate


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Stack]:
    """The run; the frontend `strict` takes the disaggregated way or none."""
    frontends = {"frontend": "auto", "strict": "strict"}
    directory = tmp_path_factory.mktemp("faults")
    run = Stack(directory, tiny, prefill=2, frontends=frontends, pool_gib=0.02, chunk_tokens=64).start()
    yield run
    run.teardown()


@pytest.fixture
async def fleet(stack: Stack) -> AsyncIterator[Fleet]:
    """The session's run; what a test leaves held fails that test."""
    named = stack.processes
    fleet = Fleet(stack, named["prefill-1"], named["prefill-2"], named["decode-1"], named["merged-1"])
    yield fleet
    await settle(fleet.prefill, fleet.alternate, fleet.decode, fleet.merged)


@pytest.fixture
async def scripted(fleet: Fleet) -> AsyncIterator[ScriptedPrefill]:
    """A prefill that says what the test wants; whoever calls it must hang up."""
    async with scripted_prefill() as prefill:
        yield prefill
        assert prefill.open_runs == 0, "decode left a lease open"


@pytest.fixture
def worker_flags(stack: Stack, tiny: Path) -> dict[str, object]:
    """For workers of a test's own, beside the run and in its registry: of another model's name, so nobody routes to
    them."""
    return {
        "model": tiny,
        "served_name": "spare",
        "dtype": "float32",
        "pool_gib": 0.02,
        "chunk_tokens": 64,
        "etcd": stack.etcd.address,
    }
