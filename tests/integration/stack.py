"""The whole of Baton as real processes, for tests: started, broken, mended and ended by name.

Names: etcd, router (router-2...), kvstore, prefill-1..., decode-1..., merged-1..., and the frontends as they are asked
for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from baton.cli.ports import free_port
from baton.v1 import kvstore_pb2, kvstore_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.etcd import EtcdServer
from tests.stopping import stop
from tests.worker_process import WorkerProcess

SERVED = "smollm2-135m-instruct"
MARK = "BATON_TEST_STACK"
HANG_S = 120.0
CLEAN_S = 10.0
"""Within this everything that a request held is free again, on whatever machine runs the tests."""
LEAVE_S = 20.0
LINGER: dict[str, object] = {"linger_s": 0.5}
"""No balancer watches the frontends of a test."""
_STUBS = {
    "router": router_pb2_grpc.RouterServiceStub,
    "kvstore": kvstore_pb2_grpc.KvStoreServiceStub,
    "prefill": worker_pb2_grpc.WorkerServiceStub,
    "decode": worker_pb2_grpc.WorkerServiceStub,
    "merged": worker_pb2_grpc.WorkerServiceStub,
}
WORKERS = ("prefill", "decode", "merged")


class Stack:
    """One run. `frontends` maps names to their --fallback, `http` are flags for every frontend, `store` for the store,
    `workers` for every worker, and `extra` are further workers: a name to its role and the flags in which it differs
    from the others."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        merged: int = 1,
        routers: int = 1,
        kvstore: bool = True,
        dtype: str = "float32",
        frontends: Mapping[str, str] | None = None,
        http: Mapping[str, object] | None = None,
        store: Mapping[str, object] | None = None,
        extra: Mapping[str, tuple[str, Mapping[str, object]]] | None = None,
        **workers: object,
    ) -> None:
        self.directory = directory
        self.mark = {MARK: secrets.token_hex(8)}
        self.etcd = EtcdServer(directory)
        self.processes: dict[str, WorkerProcess] = {}
        shared: dict[str, object] = {"etcd": self.etcd.address}
        served: dict[str, object] = {**shared, "model": model, "served_name": SERVED}
        names = ["router", *(f"router-{n}" for n in range(2, routers + 1))]
        self._plan: dict[str, tuple[str, dict[str, object]]] = dict.fromkeys(names, ("router", shared))
        if kvstore:
            self._plan["kvstore"] = ("kvstore", {**shared, "capacity_gib": 0.1, **(store or {})})
        for role, count in (("prefill", prefill), ("decode", decode), ("merged", merged)):
            for n in range(1, count + 1):
                flags = {**served, "dtype": dtype, "pool_gib": 0.5, **workers}
                self._plan[f"{role}-{n}"] = (role, flags)
        for name, (role, flags) in (extra or {}).items():
            self._plan[name] = (role, {**served, **workers, **flags})
        for name, fallback in (frontends or {"frontend": "auto"}).items():
            self._plan[name] = ("frontend", {**served, "fallback": fallback, **LINGER, **(http or {})})
        for name, (role, flags) in self._plan.items():
            self._plan[name] = (role, {**flags, "port": free_port()})

    # ---- life

    def start(self) -> Stack:
        """Start everything; returns when completions can be served by every worker."""
        try:
            self.etcd.start()
            self.heal()
        except BaseException:
            self._end_all()
            raise
        return self

    def heal(self, *names: str) -> None:
        """Continue what was stopped, start what has ended (of `names`, when there are some), and wait until everybody
        has found everybody."""
        if self.etcd.process is None:
            self.etcd.start()
        self.wake()
        ended = [name for name in names or self._plan if not self._lives(name)]
        for name in ended:
            self.launch(name)
        for name in ended:
            self.processes[name].wait_ready()
        self.wait_usable()

    def wake(self) -> None:
        """Continue what was stopped."""
        for name in self.processes:
            self.cont(name)

    def launch(self, name: str, **more: object) -> WorkerProcess:
        """Start a process (again, under its old name) without waiting for it."""
        role, flags = self._plan[name]
        self.processes[name] = WorkerProcess(role, name, self.directory, self.mark, **{**flags, **more})
        return self.processes[name]

    def restart(self, name: str) -> None:
        """kill -9 and start again under the same name elsewhere: a new process with a new epoch and address."""
        self.kill(name)
        self.launch(name, port=free_port()).wait_ready()

    def restart_in_place(self, name: str) -> None:
        """kill -9 and start again under the same name at the same address: only the epoch differs."""
        address = self.processes[name].address
        self.kill(name)
        self.launch(name).wait_ready()
        assert self.processes[name].address == address

    def kill(self, *names: str) -> None:
        """kill -9."""
        for name in names:
            self.processes[name].kill()

    def stop(self, name: str) -> None:
        """SIGSTOP the process and its engine: its ports stay open, nothing answers."""
        process = psutil.Process(self.processes[name].process.pid)
        for one in (process, *process.children(recursive=True)):
            stop(one.pid)

    def stop_engine(self, name: str) -> None:
        """SIGSTOP the engine alone: the worker's server lives and answers."""
        for engine in psutil.Process(self.processes[name].process.pid).children(recursive=True):
            stop(engine.pid)

    def cont(self, name: str) -> None:
        """SIGCONT; nothing when it has ended."""
        if self.processes[name].process.poll() is None:
            process = psutil.Process(self.processes[name].process.pid)
            for one in (*process.children(recursive=True), process):
                one.resume()

    def terminate(self, name: str) -> None:
        """SIGTERM, without waiting."""
        self.processes[name].signal(signal.SIGTERM)

    def teardown(self) -> None:
        """Nothing leaks and nothing is left. Ends everything in any case."""
        try:
            self.settle()
        finally:
            left = self._end_all()
        assert not left, f"left behind: {left}"

    # ---- what it is

    def pids(self) -> dict[str, int]:
        """Process ids of what runs, etcd included."""
        running = {name: p.process.pid for name, p in self.processes.items() if p.process.poll() is None}
        return running | ({"etcd": self.etcd.process.pid} if self.etcd.process is not None else {})

    def marked(self) -> list[psutil.Process]:
        """Every live process of this run, children of the dead included; etcd aside."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get(MARK) == self.mark[MARK]
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def url(self, frontend: str = "frontend") -> str:
        """The HTTP address of a frontend."""
        return f"http://{self.processes[frontend].address}"

    def workers(self, *roles: str) -> list[str]:
        """Names of the workers of these roles (all without), dead ones included."""
        return [name for name, (role, _) in self._plan.items() if role in (roles or WORKERS)]

    def alive(self, *roles: str) -> list[str]:
        """The same, without the dead."""
        return [name for name in self.workers(*roles) if self._lives(name)]

    def _lives(self, name: str) -> bool:
        return name in self.processes and self.processes[name].process.poll() is None

    def log(self, name: str) -> str:
        """The end of what a process said."""
        return self.etcd.log() if name == "etcd" else self.processes[name].log()

    def figures(self, name: str, *beginnings: str) -> list[str]:
        """The lines of a process's metrics that begin so, now."""
        text = httpx.get(self.processes[name].metrics, timeout=HANG_S, trust_env=False).text
        return [line for line in text.splitlines() if line.startswith(beginnings)]

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, now; 0 without any."""
        text = httpx.get(self.processes[name].metrics, timeout=HANG_S, trust_env=False).text
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        return sum(s.value for s in samples if s.name == metric and labels.items() <= s.labels.items())

    def missing(self, frontend: str = "frontend") -> list[dict[str, str]]:
        """What /ready says is missing."""
        reply = httpx.get(f"{self.url(frontend)}/ready", timeout=HANG_S, trust_env=False)
        missing: list[dict[str, str]] = reply.json()["missing"]
        assert (reply.status_code == 200) == (not missing) == reply.json()["ready"]
        return missing

    def states(self, router: str = "router") -> dict[str, str]:
        """A router's word on every worker."""
        with self._stub(router) as stub:
            reply = stub.View(router_pb2.ViewRequest(), timeout=HANG_S)
        return {view.worker.id: view.state for view in reply.workers}

    def wait_usable(self) -> None:
        """Wait until each router has every live worker in service and every frontend a session with every streaming
        one."""
        everyone = self.alive()
        for name, (role, _) in self._plan.items():
            if role == "router":
                until(lambda name=name: all(self.states(name).get(w) == "serving" for w in everyone), self.states)
        streaming = len(self.alive("decode", "merged"))
        for name, (role, _) in self._plan.items():
            if role == "frontend":
                until(lambda name=name: not self.missing(name), lambda name=name: self.missing(name))
                until(lambda name=name: self.metric(name, "baton_frontend_sessions") == streaming)

    # ---- leaks

    def findings(self) -> dict[str, list[str]]:
        """What every live worker, router and store still holds."""
        found = {}
        for name, (role, _) in self._plan.items():
            if role in _STUBS and self._lives(name) and (held := self.held(name)):
                found[name] = held
        return found

    def held(self, name: str) -> list[str]:
        """The same of one process."""
        with self._stub(name) as stub:
            return list(stub.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), timeout=HANG_S).findings)

    def settle(self, within_s: float = CLEAN_S) -> float:
        """Wait until nothing is held any more; how long that took. Fails with what still is."""
        began = time.monotonic()
        while found := self.findings():
            if time.monotonic() - began > within_s:
                logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in found)
                raise AssertionError(f"still held after {within_s} s: {found}\n{logs}")
            time.sleep(0.05)
        return time.monotonic() - began

    def clear_caches(self) -> None:
        """Every live worker and store forgets the prefixes it knows, once nothing is on its way from one to another."""
        until(lambda: "offered" not in str(self.findings()), self.findings)
        self.clear_workers()
        for name, (role, _) in self._plan.items():
            if role == "kvstore" and self._lives(name):
                with self._stub(name) as stub:
                    stub.Clear(kvstore_pb2.ClearRequest(), timeout=HANG_S)

    def clear_workers(self) -> None:
        """Every live worker forgets the prefixes it knows; what the store has is there."""
        for name in self.alive():
            self.clear_cache(name)

    def clear_cache(self, name: str) -> None:
        """One worker forgets the prefixes it knows."""
        with self._stub(name) as stub:
            stub.ClearCache(worker_pb2.ClearCacheRequest(), timeout=HANG_S)

    def indexed(self) -> int:
        """Keys that the router believes to be in some worker's cache."""
        with self._stub("router") as router:
            return int(router.View(router_pb2.ViewRequest(), timeout=HANG_S).indexed_keys)

    def stores(self, router: str = "router") -> dict[str, tuple[str, int]]:
        """A router's word on every store: its state, and how many of its blocks are indexed."""
        with self._stub(router) as stub:
            reply = stub.View(router_pb2.ViewRequest(), timeout=HANG_S)
        return {view.store.id: (view.state, view.indexed_blocks) for view in reply.stores}

    def excluded_stores(self, router: str = "router") -> dict[str, str]:
        """The stores that a router would load nothing from, and why, as it explains."""
        with self._stub(router) as stub:
            request = router_pb2.RouteRequest(uid="explained", model=SERVED, prompt_tokens=1)
            reply = stub.Explain(request, timeout=HANG_S)
        return {view.store.id: view.why for view in reply.excluded_stores}

    def listed(self, tier: str, store: str = "kvstore", tenant: str = "") -> set[bytes]:
        """The keys of the blocks (of a tenant, when named) that a store says it has in a tier."""
        with self._stub(store) as stub:
            pages = stub.List(kvstore_pb2.ListRequest(tenant=tenant), timeout=HANG_S)
            return {block.key for page in pages for block in page.blocks if tier in block.tiers}

    def rotten(self, store: str = "kvstore") -> int:
        """How many blocks of a store, in all of its tiers, are not what they were sealed as."""
        with self._stub(store) as stub:
            *_, last = stub.Verify(kvstore_pb2.VerifyRequest(), timeout=HANG_S)
        assert last.checked == last.total
        return int(last.failed)

    @contextlib.contextmanager
    def _stub(self, name: str) -> Iterator[object]:
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(self.processes[name].address, options=options) as channel:
            yield _STUBS[self._plan[name][0]](channel)

    def _end_all(self) -> list[str]:
        """End everything, frontends first; what did not go when told to, or went badly."""
        left = []
        running = [p for p in reversed(self.processes.values()) if p.process.poll() is None]
        for process in running:
            self.cont(process.id)
            process.signal(signal.SIGTERM)
        for process in running:
            try:
                code = process.process.wait(LEAVE_S)
            except Exception:
                process.kill()
                code = -signal.SIGKILL
            if code != 0:
                left.append(f"{process.id} ended with {code}:\n{process.log()}")
        self.etcd.stop()
        with contextlib.suppress(AssertionError):
            until(lambda: not self.marked(), within_s=CLEAN_S)
        for process in self.marked():
            with contextlib.suppress(psutil.Error):
                left.append(f"pid {process.pid}: {' '.join(process.cmdline())}")
                os.kill(process.pid, signal.SIGKILL)
        return left


def until(condition: Callable[[], object], describe: Callable[[], object] = str, within_s: float = HANG_S) -> None:
    """Wait until `condition()`; only a hang fails."""
    hang = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < hang, describe()
        time.sleep(0.05)
