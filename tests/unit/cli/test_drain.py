"""`baton drain` of a busy worker says what is left, of one that is gone that it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest

from baton.cli.drain import _drained, drain
from baton.cli.errors import CliError
from baton.cli.home import Home
from baton.cli.process import Record
from baton.v1 import kv_pb2, worker_pb2, worker_pb2_grpc

HANG_S = 30.0


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Has three requests, then one, and leaves with none once that was heard."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def Drain(self, request: worker_pb2.DrainRequest, context: grpc.ServicerContext) -> worker_pb2.DrainReply:
        assert self.heard.wait(HANG_S)
        return worker_pb2.DrainReply(remaining=1)

    def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.WorkerUpdate]:
        yield worker_pb2.WorkerUpdate(cache=kv_pb2.CacheEvent(cleared=True))
        for running, waiting in ((2, 1), (2, 1), (1, 0)):
            yield worker_pb2.WorkerUpdate(load=worker_pb2.Load(running=running, waiting=waiting))
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(HANG_S)  # as a worker does that has nothing new to say


@pytest.mark.timeout(60)
def test_what_a_draining_worker_has_left_is_told_as_it_changes() -> None:
    worker, server = Worker(), grpc.server(ThreadPoolExecutor(4))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    told: list[int] = []

    def hear(streams: int) -> None:
        told.append(streams)
        if streams == 1:
            worker.heard.set()

    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
            assert _drained(channel, 5.0, hear) == 1
    finally:
        server.stop(None)
    assert told == [3, 1]


@pytest.mark.parametrize(
    ("last", "said"), [('{"ready": true}\n{"left": true}\n', "has left already"), ('{"ready": true}\n', "has died")]
)
def test_who_is_gone_is_not_unknown(home: Home, last: str, said: str) -> None:
    Record("decode-1", "decode", psutil.Process().pid, 0.0, [], "", id="decode-0a", ready=True).save(home)
    (home.run / "decode-1.out").write_text(last)
    for name in ("decode-1", "decode-0a"):
        with pytest.raises(CliError) as refused:
            drain(home, name, 1.0)
        assert refused.value.message == f"{name} {said}"
        assert "start it again: " in refused.value.hint


def test_etcd_is_not_drained(home: Home) -> None:
    me = psutil.Process()
    Record("etcd", "etcd", me.pid, me.create_time(), [], "", ready=True).save(home)
    with pytest.raises(CliError) as refused:
        drain(home, "etcd", 1.0)
    assert refused.value.message.startswith("etcd cannot be drained")
