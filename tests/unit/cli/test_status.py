"""`baton status`: who joined the run is shown beside those that it started."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli import status as module
from baton.cli.home import Home
from baton.v1 import registry_pb2, router_pb2


def test_a_worker_that_joined_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = registry_pb2.Worker(id="merged-9", role=registry_pb2.ROLE_MERGED, address="127.0.0.1:9", engine="openai")
    view = router_pb2.WorkerView(worker=worker, state="serving")
    monkeypatch.setattr(module, "_view", lambda home: router_pb2.ViewReply(workers=[view], registry="connected"))
    (row,) = module.status(Home(tmp_path)).rows
    assert (row.name, row.role, row.state, row.engine) == ("merged-9", "merged", "running", "openai")
    assert row.router["state"] == "serving"
