"""`Stack` as faults need it: several routers and etcd members, some workers on another host, ports that stay."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import grpc
import orjson
import psutil

from baton.cli.ports import free_port
from baton.v1 import etcd_pb2, etcd_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2
from tests.etcd import EtcdServer
from tests.faults.suite.link import Link
from tests.integration.stack import HANG_S, Stack
from tests.worker_process import WorkerProcess

PAGE = 4096


class EtcdMembers:
    """One etcd or three, as `Stack` uses one."""

    def __init__(self, directory: Path, count: int, host: str) -> None:
        peers = {f"etcd-{n}": f"http://127.0.0.1:{free_port()}" for n in range(1, count + 1)}
        self.members = [EtcdServer(directory, name, peers, host) for name in peers]

    @property
    def address(self) -> str:
        """All of them, comma separated."""
        return ",".join(member.address for member in self.members)

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """A member that runs, if one does."""
        return next((member.process for member in self.members if member.process is not None), None)

    def start(self) -> EtcdMembers:
        """Start those that do not run; returns when all answer."""
        started = [member for member in self.members if member.process is None]
        for member in started:
            member.launch()
        for member in started:
            member.wait_healthy()
        return self

    def leader(self) -> EtcdServer:
        """The member that leads now (the only one, of one)."""
        for member in self.members:
            if member.process is not None and len(self.members) > 1 and _leads(member):
                return member
        return next(member for member in self.members if member.process is not None)

    def compact(self) -> None:
        """Forget every revision but the newest."""
        address = self.leader().address
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = etcd_pb2_grpc.KVStub(channel)
            header = stub.Range(etcd_pb2.RangeRequest(key=b"/"), timeout=HANG_S).header
            try:
                stub.Compact(etcd_pb2.CompactionRequest(revision=header.revision), timeout=HANG_S)
            except grpc.RpcError as error:  # somebody compacted there already
                if "compacted" not in str(error.details()):
                    raise

    def stop(self) -> None:
        """End all."""
        for member in self.members:
            member.stop()

    def log(self) -> str:
        """The end of what they wrote."""
        return "\n".join(member.log() for member in self.members)


def _leads(member: EtcdServer) -> bool:
    url = f"http://{member.address}/v3/maintenance/status"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, b"{}", method="POST"), timeout=2) as reply:
            status = orjson.loads(reply.read())
    except OSError:
        return False
    return bool(status["leader"] == status["header"]["member_id"])


class FaultStack(Stack):
    """`far` workers run on the far host of `link`; every process listens where the other host reaches it."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        frontends: int = 1,
        etcds: int = 1,
        link: Link | None = None,
        far: Sequence[str] = (),
        **more: object,
    ) -> None:
        names = {f"frontend-{n}": "auto" for n in range(1, frontends + 1)}
        super().__init__(directory, model, frontends=names, **more)  # type: ignore[arg-type]
        host = link.near if link is not None else "127.0.0.1"
        self.etcd = EtcdMembers(directory, etcds, host)  # type: ignore[assignment]
        self._link = link
        self.far = list(far)
        for name, (role, flags) in list(self._plan.items()):
            own = link.far if link is not None and name in self.far else host
            changed = {**flags, "etcd": self.etcd.address, "host": own}
            if role == "frontend":
                changed["log_json"] = True  # `moves` reads them
            if link is not None and name in self.far:
                changed["transports"] = "tcp"
            self._plan[name] = (role, changed)

    @property
    def members(self) -> EtcdMembers:
        """etcd."""
        return self.etcd  # type: ignore[return-value]

    def launch(self, name: str) -> WorkerProcess:
        """As `Stack.launch`, on its host."""
        role, flags = self._plan[name]
        prefix = self._link.prefix if self._link is not None and name in self.far else ()
        self.processes[name] = WorkerProcess(role, name, self.directory, self.mark, prefix, **flags)
        return self.processes[name]

    def in_service(self, name: str) -> bool:
        """Whether every router that answers says that the worker is serving."""
        said = []
        for router in self.of_role("router"):
            if self.runs(router) and self.processes[router].address:
                with contextlib.suppress(grpc.RpcError):
                    said.append(self.states(router).get(name))
        return bool(said) and all(state == "serving" for state in said)

    def prefill_rate(self) -> float:
        """Prompt tokens a second that the slowest streaming worker said it computes."""
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(self.processes["router"].address, options=options) as channel:
            reply = router_pb2_grpc.RouterServiceStub(channel).View(router_pb2.ViewRequest(), timeout=HANG_S)
        return min(v.worker.rates.prefill_tok_s for v in reply.workers)

    def runs(self, name: str) -> bool:
        """Whether the process is there."""
        return name in self.processes and self.processes[name].process.poll() is None

    def freeze(self, name: str) -> None:
        """SIGSTOP the engine, not its worker."""
        for child in psutil.Process(self.processes[name].process.pid).children(recursive=True):
            child.suspend()

    def flip(self, name: str, seed: int) -> int:
        """Change a byte in every page of the worker's KV arena; how many."""
        pid = self.processes[name].process.pid
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if "baton-kv" in os.readlink(entry) and stat.S_ISREG(entry.stat().st_mode):
                return _flip(entry, random.Random(seed))
        raise AssertionError(f"{name} has no arena")

    def flags(self) -> dict[str, tuple[str, dict[str, object]]]:
        """Role and flags of every process."""
        return self._plan

    def forget_prefixes(self) -> None:
        """Every worker that answers forgets the prefixes it knows."""
        for name in [worker for worker in self.workers() if self.runs(worker) and self.processes[worker].address]:
            with contextlib.suppress(grpc.RpcError), self._stub(name) as stub:
                stub.ClearCache(worker_pb2.ClearCacheRequest(), timeout=2)  # type: ignore[attr-defined]

    def end_all(self) -> list[str]:
        """End everything; what did not go when told to."""
        return self._end_all()

    def roles(self) -> set[str]:
        """Of all processes but etcd."""
        return {role for role, _ in self._plan.values()}

    def of_role(self, role: str) -> list[str]:
        """Names of the processes of that role."""
        return [name for name, (r, _) in self._plan.items() if r == role]


def _flip(path: Path, chance: random.Random) -> int:
    with path.open("r+b", buffering=0) as arena:
        size = os.fstat(arena.fileno()).st_size
        offsets = [base + chance.randrange(PAGE) for base in range(0, size - PAGE + 1, PAGE)]
        for offset in offsets:
            byte = os.pread(arena.fileno(), 1, offset)[0]
            os.pwrite(arena.fileno(), bytes([byte ^ (1 + chance.randrange(255))]), offset)
    return len(offsets)
