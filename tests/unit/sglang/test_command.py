"""Command lines of SGLang's servers: every flag is one that this version of SGLang has."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from baton.engine.sglang.launch.command import (
    DECIDE_KV,
    Join,
    Mode,
    Server,
    extra_config,
    join_command,
    pair_command,
    server_command,
    weights_as_run,
)
from baton.engine.sglang.launch.pairing import FIELDS
from baton.engine.sglang.options import Options
from tests.sglang_wheel import unpacked

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = Options(weights="w" * 32, etcd="etcd:2379")


def server(mode: Mode, **more: object) -> Server:
    values = {"tensor_parallel": 2, "bootstrap_port": 9001, "storage": OPTIONS, **more}
    return Server(mode, "/models/m", "m", "10.0.0.5", 30000, **values)  # type: ignore[arg-type]


def flags(command: list[str]) -> dict[str, str]:
    """Flag -> value, for everything after the module; a flag without one has an empty value."""
    words = command[3:]
    return {
        word: words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else ""
        for i, word in enumerate(words)
        if word.startswith("--")
    }


def known_flags() -> set[str]:
    """SGLang's own, from the fields of its arguments."""
    folder = unpacked() / "sglang" / "srt" / "arg_groups" / "fields"
    fields = {
        node.target.id
        for path in folder.glob("*.py")
        for group in ast.parse(path.read_text()).body
        if isinstance(group, ast.ClassDef)
        for node in group.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {"--" + field.replace("_", "-") for field in fields}


@pytest.mark.parametrize("mode", list(Mode))
def test_every_flag_is_sglangs(mode: Mode) -> None:
    command = server_command(server(mode))
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert set(flags(command)) <= known_flags()
    assert (unpacked() / "sglang" / "srt" / "entrypoints" / "http_server.py").is_file()


def test_the_modes() -> None:
    merged, prefill, decode = (flags(server_command(server(mode))) for mode in Mode)
    assert "--disaggregation-mode" not in merged
    assert (prefill["--disaggregation-mode"], decode["--disaggregation-mode"]) == ("prefill", "decode")
    assert {f["--disaggregation-transfer-backend"] for f in (prefill, decode)} == {"nixl"}
    assert prefill["--disaggregation-bootstrap-port"] == "9001"
    assert "--disaggregation-bootstrap-port" not in decode
    for with_store in (merged, prefill):
        assert with_store["--hicache-storage-backend"] == "dynamic"
        assert with_store["--hicache-storage-backend-extra-config"] == extra_config(OPTIONS)
        assert with_store["--hicache-mem-layout"] == "page_first_direct"
    assert not any("hicache" in flag for flag in decode), "decode's KV comes from prefill"
    assert {f["--page-size"] for f in (merged, prefill, decode)} == {"64"}


def test_without_a_store_and_with_flags_of_ones_own() -> None:
    command = server_command(server(Mode.MERGED, storage=None, more=["--page-size", "128"]))
    assert not any("hicache" in flag for flag in flags(command))
    assert command[-2:] == ["--page-size", "128"], "the last one wins"


def test_the_extra_config_names_a_class_that_is_there() -> None:
    said = json.loads(extra_config(OPTIONS))
    source = Path(*said["module_path"].split(".")).with_suffix(".py")
    classes = [n.name for n in ast.parse((ROOT / source).read_text()).body if isinstance(n, ast.ClassDef)]
    assert said["class_name"] in classes
    assert said["interface_v1"] == 1


def test_what_makes_other_kv_of_the_same_files_is_another_name() -> None:
    plain = weights_as_run("w", ["--mem-fraction-static", "0.8"])
    assert plain == "w"
    quantised = weights_as_run("w", ["--quantization", "fp8", "--tp", "2"])
    assert quantised == weights_as_run("w", ["--quantization=fp8"]) != plain
    assert weights_as_run("w", ["--dtype", "half", "--quantization", "fp8"]) == weights_as_run(
        "w", ["--quantization", "fp8", "--dtype=half"]
    )
    assert set(DECIDE_KV) <= known_flags()


def test_joining() -> None:
    join = Join("http://127.0.0.1:9", "m", "/models/m", "etcd:2379", "c", "10.0.0.5")
    said = flags(join_command(join))
    assert join_command(join)[1:3] == ["-m", "services.merged"]
    assert said["--upstream"] == "http://127.0.0.1:9/v1"
    assert (said["--model"], said["--tokenizer"], said["--served-name"]) == ("m", "/models/m", "m")
    assert (said["--etcd"], said["--cluster"], said["--host"]) == ("etcd:2379", "c", "10.0.0.5")


def test_the_pairs_command_can_be_read() -> None:
    command = pair_command("http://p:1", 9001, "http://d:2", "127.0.0.1", 7)
    assert command[1:3] == ["-m", "baton.engine.sglang.launch.pair"]
    assert flags(command)["--bootstrap-port"] == "9001"


def test_sglang_takes_the_fields_that_pair_a_request() -> None:
    source = unpacked() / "sglang" / "srt" / "entrypoints" / "openai" / "protocol.py"
    classes = {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}
    fields = [n.target.id for n in classes["PDRoutingFields"].body if isinstance(n, ast.AnnAssign)]  # type: ignore[union-attr]
    assert set(FIELDS) <= set(fields)
    for request in ("CompletionRequest", "ChatCompletionRequest"):
        assert "PDRoutingFields" in [base.id for base in classes[request].bases if isinstance(base, ast.Name)]
