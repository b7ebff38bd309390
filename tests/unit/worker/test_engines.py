"""From a worker's flags to what its engine is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.vllm.options import VllmOptions
from baton.worker.engines import choose_engine
from baton.worker.settings import WorkerSettings
from services.merged.service import MERGED
from tests.tiny_model import make_tiny_model


def test_what_vllm_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[VllmOptions] = []

    def engine(options: VllmOptions, **_: Any) -> None:
        told.append(options)

    monkeypatch.setattr("baton.engine.vllm.host.VllmEngine", engine)
    model = str(make_tiny_model(tmp_path / "tiny", layers=1, hidden=32))
    flags = ["--engine", "vllm", "--model", model, "--dtype", "float32", "--pool-gib", "0.5", "--vllm-cache-gib", "2"]
    flags += ["--vllm-tensor-parallel", "2", "--max-streams", "3", "--chunk-tokens", "128", "--core", "1"]
    process: Any = SimpleNamespace(id="w", epoch=1)
    choose_engine(process, MERGED, WorkerSettings.parse(flags))
    (options,) = told
    assert options == VllmOptions(
        model,
        dtype="float32",
        pool_bytes=2**29,
        cache_bytes=2**31,
        max_streams=3,
        chunk_tokens=128,
        core=1,
        tensor_parallel=2,
    )
