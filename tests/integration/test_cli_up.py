"""`baton up` and `baton down` for real: the whole stack, with its own home and its own ports."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton.cli.home import Home
from baton.cli.process import end, marked
from baton.registry.lease import LEASE_S
from tests.integration.cli import HANG_S, Cli
from tests.integration.idle import idle_shares

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
SERVED = "smollm2-135m-instruct"
ROLES = ("prefill", "decode", "merged")
EVERYONE = {"etcd", "router", "kvstore", "prefill-1", "decode-1", "merged-1", "frontend"}


@pytest.fixture(scope="module")
def _module_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home").resolve())


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """A command line whose processes are gone after the test."""
    yield from _cli(Home((tmp_path / "home").resolve()))


def _cli(home: Home) -> Iterator[Cli]:
    yield Cli(home)
    left = [process.cmdline() for process in marked(home)]
    end(marked(home), 5.0)
    assert not left


@pytest.fixture(scope="module")
def up(model_path: Path) -> list[str]:
    """`baton up` on ports of its own."""
    return ["up", "--model", str(model_path), "--served-name", SERVED, "--http-port", "0", "--etcd-port", "0"]


@pytest.fixture(scope="module")
def stack(_module_home: Home, up: list[str]) -> Iterator[tuple[Cli, dict[str, Any]]]:
    """A run that several tests look at; its `down` is a test of its own: nothing is left."""
    cli = Cli(_module_home)
    try:
        running = cli.json(*up)
        yield cli, running
        rows = cli.processes()
        written = {log: log.stat().st_size for log in _module_home.logs.glob("*.log") if log.stem != "etcd"}
        cli("down")
        ended = [line for log, size in written.items() for line in log.read_bytes()[size:].decode().splitlines()]
        assert any(" left " in line for line in ended)
        assert not [line for line in ended if "[warning" in line or "[error" in line]  # an ordered stop is no trouble
        assert marked(_module_home) == []
        assert list(_module_home.run.glob("*.json")) == []
        for row in rows.values():
            host, port = row["address"].rsplit(":", 1)
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0, row["name"]
        assert cli.json("down") == {"stopped": [], "killed": []}
    finally:
        left = [process.cmdline() for process in marked(_module_home)]
        end(marked(_module_home), 5.0)
        assert not left


def complete(url: str, **more: object) -> httpx.Response:
    """One real completion."""
    body = {"model": SERVED, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, **more}
    with httpx.Client(timeout=HANG_S, trust_env=False) as client:
        return client.post(f"{url}/v1/chat/completions", json=body)


def test_up_serves_a_real_model(stack: tuple[Cli, dict[str, Any]]) -> None:
    _, running = stack
    assert running["model"] == SERVED
    assert running["already_running"] is False
    assert set(running["started"]) == EVERYONE
    answer = complete(running["url"])
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-baton-route"].split(";")[0] in ("disaggregated", "merged", "local")
    assert Path(running["logs"], "decode-1.log").stat().st_size > 0


def test_up_again_says_that_it_runs(stack: tuple[Cli, dict[str, Any]], up: list[str]) -> None:
    cli, running = stack
    before = {name: row["pid"] for name, row in cli.processes().items()}
    again = cli.json(*up)
    assert again["already_running"] is True
    assert again["started"] == []
    assert again["url"] == running["url"]
    assert {name: row["pid"] for name, row in cli.processes().items()} == before
    told = cli(*up)
    assert "already running" in told.stdout
    steps = [line.strip().split("  ", 1)[-1].split(": ", 1) for line in told.stderr.splitlines()]
    assert steps
    assert all(name != state for name, state in steps), told.stderr


def test_up_with_other_options_asks_for_down_first(stack: tuple[Cli, dict[str, Any]], up: list[str]) -> None:
    cli, _ = stack
    refused = cli(*up, "--decode", "2", code=1)
    assert "--decode 1 -> 2" in refused.stderr
    assert "baton down" in refused.stderr
    assert set(cli.processes()) == EVERYONE


def test_status_shows_each_process(stack: tuple[Cli, dict[str, Any]]) -> None:
    cli, _ = stack
    status = cli.json("status")
    assert status["healthy"] is True
    assert status["registry"] == "connected"
    rows = {row["name"]: row for row in status["processes"]}
    assert set(rows) == EVERYONE
    for row in rows.values():
        assert row["state"] == "running"
        assert row["address"].startswith("127.0.0.1:")
        assert row["memory_bytes"] > 0
        assert psutil.pid_exists(row["pid"])
    for name in ("prefill-1", "decode-1", "merged-1"):
        assert rows[name]["router"]["state"] == "serving"
    table = cli("status").stdout
    assert all(name in table for name in EVERYONE)


def test_explain_tells_every_candidate(stack: tuple[Cli, dict[str, Any]]) -> None:
    cli, _ = stack
    reply = cli.json("explain", "Why is the sky blue? " * 20)
    assert reply["prompt_tokens"] > 100
    assert {one["mode"] for one in reply["candidates"]} == {"disaggregated", "merged", "local"}
    assert sum(one["chosen"] for one in reply["candidates"]) == 1
    assert reply["summary"] in cli("explain", "Why is the sky blue? " * 20).stdout.replace("\n", " ")


def test_logs_and_bench_list(stack: tuple[Cli, dict[str, Any]]) -> None:
    cli, _ = stack
    assert "services.router" in cli("logs", "router", "-n", "10000").stdout
    assert "usage: baton bench" in cli("bench").stdout


def test_idle_processes_use_no_cpu(stack: tuple[Cli, dict[str, Any]]) -> None:
    """CPU seconds of each process and its children while nothing is asked: less than a hundredth of a core."""
    cli, _ = stack
    pids = {name: row["pid"] for name, row in cli.processes().items() if name != "etcd"}

    def used(pid: int) -> float:
        process = psutil.Process(pid)
        return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])

    time.sleep(3.0)  # what the last request left to do
    busy = idle_shares(lambda: {name: used(pid) for name, pid in pids.items()})
    assert max(busy.values()) < 0.01, busy


def test_up_starts_what_died(stack: tuple[Cli, dict[str, Any]], up: list[str]) -> None:
    cli, running = stack
    before = cli.processes()
    for name in ("decode-1", "router"):
        os.kill(before[name]["pid"], signal.SIGKILL)
    until(lambda: cli.processes()["decode-1"]["state"] == "dead")
    assert cli.json("status", code=1)["healthy"] is False
    again = cli.json(*up)
    assert set(again["started"]) == {"decode-1", "router"}
    after = cli.processes()
    assert {name for name in EVERYONE if after[name]["pid"] == before[name]["pid"]} == EVERYONE - {"decode-1", "router"}
    assert complete(running["url"]).status_code == 200


@pytest.mark.parametrize("empty", [False, True], ids=["same-data", "empty-data"])
def test_etcd_gone_for_longer_than_the_leases_fails_no_request(
    stack: tuple[Cli, dict[str, Any]], up: list[str], empty: bool
) -> None:
    """Requests go on while etcd is dead, while it comes back, and after; no process ends for it."""
    cli, running = stack
    away_s = 2.0 if empty else 1.2 * LEASE_S  # with the data, every lease is gone at once
    before = cli.processes()
    failed: list[str] = []
    served = 0
    after = 0.0
    os.kill(before["etcd"]["pid"], signal.SIGKILL)
    began = time.monotonic()
    while not after or time.monotonic() - after < 1.3 * LEASE_S:
        answer = complete(running["url"], stream=False)
        served += 1
        if answer.status_code != 200 or not answer.json()["choices"][0]["message"]["content"]:
            failed.append(f"{time.monotonic() - began:.1f} s: {answer.status_code} {answer.text}")
        if not after and time.monotonic() - began > away_s:
            if empty:
                shutil.rmtree(cli.home.etcd)
            restarted = cli.json(*up)
            assert restarted["started"] == ["etcd"]
            after = time.monotonic()
    assert failed == []
    assert served > 10
    rows = cli.processes()
    assert {name for name in EVERYONE if rows[name]["pid"] != before[name]["pid"]} == {"etcd"}
    status = cli.json("status")
    assert status["registry"] == "connected"
    assert all(row["router"]["state"] == "serving" for row in status["processes"] if row["role"] in ROLES)


def test_drain(stack: tuple[Cli, dict[str, Any]]) -> None:
    cli, running = stack
    for name in ("prefill-1", "router"):
        assert cli.json("drain", name, "--deadline", "5") == {"process": name, "remaining": 0}
    status = cli.json("status")
    assert status["healthy"] is True  # nothing has died
    states = {row["name"]: row["state"] for row in status["processes"]}
    assert {name: state for name, state in states.items() if state != "running"} == {
        "prefill-1": "drained",
        "router": "drained",
    }
    (again,) = [line for line in cli("status").stdout.splitlines() if "start again" in line]
    assert "prefill-1 (drained), router (drained): " in again
    assert f"--served-name {SERVED}" in again
    answer = complete(running["url"])
    assert answer.status_code == 200
    assert not answer.headers["x-baton-route"].startswith("disaggregated")


@pytest.mark.parametrize("option", ["--http-port", "--etcd-port"])
def test_port_in_use_is_one_line_and_leaves_nothing(cli: Cli, up: list[str], option: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        arguments = [*up]
        arguments[arguments.index(option) + 1] = port
        refused = cli(*arguments, code=1)
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error:")]
    assert port in line
    assert f"pid {os.getpid()}" in line
    assert option in refused.stderr
    assert marked(cli.home) == []


def test_failed_start_shows_the_log_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really" * 100)
    refused = cli("up", "--model", str(broken), "--http-port", "0", "--etcd-port", "0", code=1)
    assert "died at start" in refused.stderr
    assert ".log" in refused.stderr
    assert marked(cli.home) == []
    assert cli.json("status", code=1)["processes"] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_up_leaves_nothing(cli: Cli, up: list[str], number: signal.Signals) -> None:
    with cli.start(*up) as process:
        until(lambda: len(marked(cli.home)) >= 4)
        process.send_signal(number)
        _, told = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    (ended,) = [line for line in told.splitlines() if line.startswith("interrupted; ended again: ")]
    assert {"etcd", "router", "kvstore"} <= set(ended.partition(": ")[2].split(", "))
    assert marked(cli.home) == []


def until(condition: Callable[[], bool]) -> None:
    """Wait; only a hang fails."""
    hang = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < hang
        time.sleep(0.05)
