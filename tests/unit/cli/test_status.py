"""`baton status`: who joined the run is shown beside those that it started; who left on purpose is not dead."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from baton.cli import status as module
from baton.cli.home import Home
from baton.cli.main import app
from baton.cli.process import Record
from baton.cli.stack import Options
from baton.v1 import registry_pb2, router_pb2


def test_a_worker_that_joined_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = registry_pb2.Worker(id="merged-9", role=registry_pb2.ROLE_MERGED, address="127.0.0.1:9", engine="openai")
    view = router_pb2.WorkerView(worker=worker, state="serving")
    monkeypatch.setattr(module, "_view", lambda home: router_pb2.ViewReply(workers=[view], registry="connected"))
    (row,) = module.status(Home(tmp_path)).rows
    assert (row.name, row.role, row.state, row.engine) == ("merged-9", "merged", "running", "openai")
    assert row.router["state"] == "serving"


@pytest.mark.parametrize(
    ("last", "state", "code"), [('{"ready": true}\n', "dead", 1), ('{"ready": true}\n{"left": true}\n', "drained", 0)]
)
def test_who_was_told_to_leave_has_not_died(
    home: Home, monkeypatch: pytest.MonkeyPatch, last: str, state: str, code: int
) -> None:
    monkeypatch.setattr(module, "_view", lambda home: router_pb2.ViewReply(registry="connected"))
    me = psutil.Process()
    Record("router", "router", me.pid, me.create_time(), [], "", ready=True).save(home)
    Record("decode-1", "decode", me.pid, me.create_time() - 60, [], "", ready=True).save(home)
    (home.run / "decode-1.out").write_text(last)
    (home.run / "up.json").write_text(json.dumps(asdict(Options(http_port=8080, settings={"BATON_POOL_GIB": "0.5"}))))
    told = CliRunner().invoke(app, ["status", "--json"])
    assert told.exit_code == code
    states = {row["name"]: row["state"] for row in json.loads(told.stdout)["processes"]}
    assert states == {"router": "running", "decode-1": state}
    shown = CliRunner().invoke(app, ["status"])
    assert shown.exit_code == code
    again = [line for line in shown.stdout.splitlines() if "up --http-port 8080" in line]
    assert len(again) == 1
    assert f"decode-1 ({state})" in again[0]
    assert "BATON_POOL_GIB=0.5 " in again[0]


def test_a_run_of_which_nothing_runs_is_not_well(home: Home) -> None:
    Record("router", "router", psutil.Process().pid, 0.0, [], "", ready=True).save(home)
    (home.run / "router.out").write_text('{"left": true}\n')
    assert CliRunner().invoke(app, ["status"]).exit_code == 1


def test_what_left_a_run_is_started_with_the_options_of_the_run(home: Home) -> None:
    Record("frontend", "frontend", psutil.Process().pid, 0.0, [], "", ready=True).save(home)
    (home.run / "up.json").write_text(json.dumps(asdict(Options(http_port=8081))))
    told = CliRunner().invoke(app, ["explain", "hello"])
    assert told.exit_code == 1
    assert "no frontend is running" in told.stderr
    assert "up --http-port 8081" in told.stderr
