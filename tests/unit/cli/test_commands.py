"""What each command says when there is nothing, or something wrong: one line, and what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from baton.cli import kv, model, sglang
from baton.cli.errors import CliError
from baton.cli.home import Home
from baton.cli.main import app
from baton.cli.ports import Wanted, free_port, is_free, need_free
from baton.cli.stack import Options
from baton.cli.terms import MODES, TERMS
from services.router.costs import Terms
from services.router.policy import Mode

COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)
KV_COMMANDS = sorted(
    command.name or command.callback.__name__ for command in kv.app.registered_commands if command.callback
)
SGLANG_COMMANDS = sorted(command.callback.__name__ for command in sglang.app.registered_commands if command.callback)
MODEL_COMMANDS = sorted(
    command.name or command.callback.__name__ for command in model.app.registered_commands if command.callback
)
GROUPED = [
    *(f"kv {name}" for name in KV_COMMANDS),
    *(f"model {name}" for name in MODEL_COMMANDS),
    *(f"sglang {name}" for name in SGLANG_COMMANDS),
]


def test_commands_are_the_promised_ones() -> None:
    assert COMMANDS == ["bench", "down", "drain", "explain", "fetch", "logs", "merged", "status", "up"]
    assert KV_COMMANDS == ["clear", "ls", "stats", "verify"]
    assert SGLANG_COMMANDS == ["decode", "merged", "prefill"]
    assert MODEL_COMMANDS == ["convert"]


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPED])
def test_help_teaches(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) >= 3


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["up", "--dtype", "int4"], "--dtype int4 is not known", "bfloat16, float32"),
        (["up", "--engine", "abacus"], "--engine abacus is not known", "torch, vllm"),
        (["fetch", "--engine", "abacus"], "--engine abacus is not known", "torch, vllm"),
        (["model", "convert", "/nowhere.gguf", "/tmp/x"], "there is no model at /nowhere.gguf", ".gguf file"),
        (["model", "convert", "/nowhere.gguf", "/tmp/x", "--dtype", "int4"], "--dtype int4 is not known", "bfloat16"),
        (["up", "--fallback", "maybe"], "--fallback maybe is not known", "auto, strict"),
        (["up", "--cores", "zero"], "--cores zero is no list", "0,1"),
        (["up", "--cores", "4711"], "core 4711 is not there", "cores: "),
        (["up", "--decode", "0", "--merged", "0"], "nothing could stream", "one decode or merged"),
        (["up", "--model", "/nowhere"], "there is no model at /nowhere", ".gguf"),
        (["logs"], "no logs yet", "baton up"),
        (["logs", "router"], "no log of router", "none yet"),
        (["merged", "--model", "m", "--upstream", "http://h"], "nothing is running here", "--etcd"),
        (["merged", "--model", "m", "--etcd", "h:1"], "--engine openai needs --upstream", "http://"),
        (
            ["merged", "--model", "m", "--upstream", "http://h", "--etcd", "h:1"],
            "tokenizer is not known",
            "--tokenizer DIR",
        ),
        (["drain", "decode-1"], "there is no process decode-1", "none is running"),
        (["explain", "hello"], "no frontend is running", "baton up"),
        (["kv", "stats"], "no kvstore is running", "baton up"),
        (["kv", "ls", "--store", "nobody"], "there is no store nobody", "none runs here"),
        (["kv", "ls", "--store", "a:b:c"], "there is no store a:b:c", "host:port"),
        (["kv", "verify", "--store", "127.0.0.1:1"], "127.0.0.1:1 answers UNAVAILABLE", "baton status"),
        (
            ["sglang", "merged", "--model", "/tmp", "--served-name", "m", "--page-size", "33", "--no-store"],
            "multiple of 32, not 33",
            "64",
        ),
        (["bench", "nothing-like-it"], "no benchmark nothing-like-it", "benchmarks: "),
    ],
)
def test_errors_are_one_line_and_a_hint(home: Home, arguments: list[str], message: str, hint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert lines[1].startswith("hint: ")
    assert hint in lines[1]


def test_the_terms_of_explain_are_the_routers() -> None:
    assert tuple(TERMS) == Terms._fields
    assert set(MODES) == set(Mode)
    help = CliRunner().invoke(app, ["explain", "--help"], env={"COLUMNS": "200"}).output
    assert all(f"{word}: {meaning}" in help for word, meaning in (MODES | TERMS).items())


def test_explain_says_what_its_terms_mean(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"mode": "merged", "worker": "m", "prefill": "", "total_ms": 21.5, "excluded": "", "chosen": True}
    one |= {"terms_ms": {"prefill": 20.0, "queue": 1.5, "stall": 0.0}, "cached_tokens": 0, "store": ""}
    reply = {"candidates": [one], "prompt_tokens": 7, "summary": "merged", "excluded_stores": []}
    monkeypatch.setattr("baton.cli.explain.explain", lambda home, prompt, **options: reply)
    shown = CliRunner().invoke(app, ["explain", "hello"]).output
    assert [term for term, meaning in TERMS.items() if meaning in shown] == ["queue", "prefill"]


def test_explain_says_on_which_tier_of_a_store_a_prefix_lies_and_which_store_is_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"mode": "merged", "worker": "m", "prefill": "", "total_ms": 21.5, "excluded": "", "chosen": True}
    one |= {"terms_ms": {"load": 21.5}, "cached_tokens": 32, "store": "s", "stored_tokens": 96, "store_tier": "nvme"}
    out = {"store": "t", "why": "quarantined: is silent"}
    reply = {"candidates": [one], "prompt_tokens": 107, "summary": "merged", "excluded_stores": [out]}
    monkeypatch.setattr("baton.cli.explain.explain", lambda home, prompt, **options: reply)
    shown = CliRunner().invoke(app, ["explain", "hello"], env={"COLUMNS": "200"}).output
    assert "32 (96 in s, nvme)" in shown
    assert "nothing is loaded from t: quarantined: is silent" in shown


def test_a_folder_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", "/proc/baton")
    result = CliRunner().invoke(app, ["down"])
    assert result.exit_code == 1
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: /proc/baton")
    assert "BATON_HOME" in hint


def test_nothing_running(home: Home) -> None:
    result = CliRunner().invoke(app, ["status", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"healthy": False, "registry": "", "processes": []}
    result = CliRunner().invoke(app, ["down", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"stopped": [], "killed": []}


def test_port_in_use_names_port_and_holder() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(CliError) as caught:
            need_free(Wanted(port, "HTTP", "--http-port"))
        assert str(port) in caught.value.message
        assert "pid " in caught.value.message
        assert "--http-port" in caught.value.hint
    assert is_free(port)
    need_free(Wanted(0, "HTTP", ""))


def test_every_port_in_use_is_named_at_once() -> None:
    with socket.socket() as one, socket.socket() as other:
        for held in (one, other):
            held.bind(("127.0.0.1", 0))
            held.listen()
        ports = [held.getsockname()[1] for held in (one, other)]
        with pytest.raises(CliError) as caught:
            need_free(
                Wanted(ports[0], "HTTP", "--http-port"), Wanted(0, "x", "--x"), Wanted(ports[1], "etcd", "--etcd")
            )
        assert all(str(port) in caught.value.message for port in ports)
        assert "--http-port and --etcd" in caught.value.hint


def test_processes_that_ask_at_once_are_given_different_ports(tmp_path: Path) -> None:
    """Between the asking and the server's start the port is free for anyone who looks."""
    code = "from baton.cli.ports import free_port\nprint(*[free_port() for _ in range(300)])"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    asking = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    given = [port for process in asking for port in process.communicate(timeout=120)[0].split()]
    assert len(given) == len(set(given)) == 900


def test_a_spoilt_record_of_ports_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    record = tmp_path / f"baton-ports-{os.getuid()}"
    for spoilt in (b"", b"\xff\x00", b"-1", b"9" * 5000):
        record.write_bytes(spoilt)
        assert is_free(free_port())
        assert free_port() != free_port()


def test_cli_imports_no_service_and_no_torch() -> None:
    """`baton status` must be quick, and services are started, never imported."""
    code = "import sys, baton.cli.main, baton.cli.up, baton.cli.status, baton.cli.drain, baton.cli.explain\n"
    code += "print([m for m in sys.modules if m.split('.')[0] in ('services', 'torch', 'transformers')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_told() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"baton {version('baton')}\n")


def test_an_upstream_that_is_no_url_is_refused_at_once() -> None:
    done = CliRunner().invoke(
        app, ["merged", "--engine", "openai", "--etcd", "127.0.0.1:1", "--model", "m", "--upstream", "x"]
    )
    assert done.exit_code == 1
    assert "--upstream 'x' is no http:// or https:// URL" in done.stderr


def test_options_and_flags_agree() -> None:
    """Every option of a run is a flag of `baton up` with the same default."""
    command = typer.main.get_command(app)
    flags = {p.name: p.default for p in command.commands["up"].params}  # type: ignore[attr-defined]
    for name, value in vars(Options()).items():
        if name == "settings":  # of the environment
            continue
        assert flags[name] == (value if name != "cores" else ""), name


@pytest.mark.parametrize("command", ["ls", "clear"])
def test_an_empty_tenant_is_not_everybody(home: Home, command: str) -> None:
    """`--tenant "$UNSET"`."""
    result = CliRunner().invoke(app, ["kv", command, "--tenant", "", "--store", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert "it is empty" in result.stderr


def test_an_empty_fingerprint_is_not_every_layout(home: Home) -> None:
    result = CliRunner().invoke(app, ["kv", "clear", "--fingerprint", "", "--store", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert "it is empty" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["kv", "ls", "--tenant", "\udcff"], ["kv", "stats", "--store", "\udcff:1"], ["explain", "a\udcff"]]
)
def test_an_argument_that_is_no_text_is_refused(home: Home, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "is no UTF-8" in result.stderr
