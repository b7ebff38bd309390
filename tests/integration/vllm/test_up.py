"""`baton up --engine vllm`, one command from a GGUF file to a completion out of vLLM."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.cli.home import Home
from baton.cli.process import end, marked
from baton.model.files import open_model
from tests.integration.cli import HANG_S, Cli

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
SERVED = "smollm2-135m-instruct"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """A command line whose processes are gone after the test."""
    monkeypatch.setenv("BATON_POOL_GIB", "0.25")
    monkeypatch.setenv("BATON_VLLM_CACHE_GIB", "0.25")
    home = Home((tmp_path / "home").resolve())
    yield Cli(home)
    left = [process.cmdline() for process in marked(home)]
    end(marked(home), 5.0)
    shutil.rmtree(home.root)  # half a gigabyte
    assert not left


def test_one_command(cli: Cli, model_path: Path) -> None:
    up = ["up", "--engine", "vllm", "--model", str(model_path), "--served-name", SERVED, "--merged", "0"]
    up += ["--http-port", "0", "--etcd-port", "0"]
    running = cli.json(*up)
    (config,) = cli.home.models.glob("converted/*/*/config.json")
    assert open_model(config.parent).config["architectures"] == ["LlamaForCausalLM"]
    rows = cli.processes()
    assert {name: row["engine"] for name, row in rows.items() if row["engine"]} == {
        "prefill-1": "vllm",
        "decode-1": "vllm",
    }
    assert "vllm" in cli("status").stdout

    body = {"model": SERVED, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{running['url']}/v1/completions", json=body, timeout=HANG_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["text"]

    assert cli.json(*up)["already_running"] is True
    assert set(cli.json("down")["killed"]) == set()
    assert marked(cli.home) == []
