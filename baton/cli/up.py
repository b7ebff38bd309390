"""`baton up`: start what is missing, wait until a real completion came back, or stop again what was started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import asdict, dataclass
from typing import Protocol

import httpx

from baton.cli.api_key import authorization
from baton.cli.converted import as_directory
from baton.cli.down import GRACE_S, stop
from baton.cli.errors import CliError
from baton.cli.fetch import find_etcd, find_model
from baton.cli.home import Home
from baton.cli.ports import HOST, Wanted, free_port, need_free
from baton.cli.process import Record, children_of, end, marked, process_of, ready_line, records, spawn, tail
from baton.cli.stack import Options, Spec, etcd_spec, service_specs, shared_cores
from baton.cli.vllm_env import vllm_python

READY_S = {"torch": 300.0, "vllm": 900.0}
"""How long processes of a run with that engine may take to be ready, and then the whole to answer."""
TOLD_S = 10.0
"""How often is said who is still awaited."""
ANSWER_S = 120.0
"""How long the first completion may take."""
LOG_LINES = 15


class Progress(Protocol):
    """What `up` tells whoever shows it."""

    def step(self, name: str, state: str, *, done: bool = False) -> None:
        """A process, or a step, is now in this state; `done` is one that it stays in."""


@dataclass(frozen=True)
class Running:
    """A run that answers."""

    url: str
    model: str
    already: bool
    started: list[str]
    seconds: float


@dataclass(frozen=True)
class _Child:
    record: Record
    process: subprocess.Popen[bytes]


def up(home: Home, options: Options, progress: Progress) -> Running:
    """Bring the run up. Raises CliError; then nothing that this call started is left running."""
    began = time.monotonic()
    with home.locked():
        alive = {record.name: record for record in records(home) if process_of(record)}
        _same_options(home, options, bool(alive))
        wanted = {
            "frontend": Wanted(options.http_port, "HTTP", "--http-port"),
            "etcd": Wanted(options.etcd_port, "etcd", "--etcd-port"),
        }
        need_free(*(port for name, port in wanted.items() if name not in alive))
        model = find_model(home, options.model, lambda text: progress.step("model", text))
        python = sys.executable
        if options.engine == "vllm":
            model = as_directory(home, model, lambda text: progress.step("model", text))
            python = vllm_python(lambda text: progress.step("vllm", text))
            progress.step("vllm", "ready", done=True)
        progress.step("model", "ready", done=True)
        children: list[_Child] = []
        try:
            cores = shared_cores(options, os.sched_getaffinity(0))
            etcd = _etcd(home, options, alive, children, progress, cores)
            specs = service_specs(options, str(model), f"{HOST}:{etcd}", python, str(home.batches))
            for spec in specs:
                if spec.name in alive:
                    progress.step(spec.name, "ready", done=True)
                else:
                    children.append(_start(home, spec, progress, cores))
            (home.run / "up.json").write_text(json.dumps(asdict(options)))
            _wait_ready(home, [c for c in children if c.record.role != "etcd"], READY_S[options.engine], progress)
            url = _url(home)
            served = _first_completion(home, url, children, READY_S[options.engine], progress)
        except BaseException as error:
            with _undisturbed():
                ended = _undo(home, set(alive), children, progress)
            if ended:
                error.add_note(f"ended again: {', '.join(ended)}")
            if not alive:
                (home.run / "up.json").unlink(missing_ok=True)
            raise
    started = [child.record.name for child in children]
    return Running(url, served, not started, started, time.monotonic() - began)


def _undo(home: Home, before: set[str], children: list[_Child], progress: Progress) -> list[str]:
    """End what was started after `before`, also what an interrupt left without a place in `children`. Returns names."""
    for child in reversed(children):
        progress.step(child.record.name, "stopping")
    everything = records(home)
    done = stop(home, [record for record in everything if record.name not in before])
    kept = [process for record in everything if record.name in before and (process := process_of(record))]
    pids = {process.pid for one in kept for process in (one, *children_of(one))}
    end([process for process in marked(home) if process.pid not in pids], GRACE_S)
    for child in children:
        progress.step(child.record.name, "stopped")
    return [*done.stopped, *done.killed]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the run behind."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _same_options(home: Home, options: Options, anything: bool) -> None:
    if not anything:
        (home.run / "up.json").unlink(missing_ok=True)
        return
    before = home.options()
    if before and (changed := options.differences(before)):
        told = "; ".join(changed)
        raise CliError(f"already running with other options ({told})", "run `make down` or `baton down` first")


def _etcd(
    home: Home,
    options: Options,
    alive: dict[str, Record],
    children: list[_Child],
    progress: Progress,
    cores: Set[int],
) -> int:
    """The port of a healthy etcd of ours; started when there is none."""
    if "etcd" in alive:
        progress.step("etcd", "ready", done=True)
        return int(alive["etcd"].address.rsplit(":", 1)[1])
    # Services that still run find etcd where it was.
    before = [record for record in records(home) if record.name == "etcd" and record.address]
    port = options.etcd_port or (int(before[0].address.rsplit(":", 1)[1]) if before and alive else free_port())
    if not alive:
        shutil.rmtree(home.etcd, ignore_errors=True)  # whoever an earlier run registered is gone
    binary = find_etcd(home, lambda text: progress.step("etcd", text))
    child = _start(home, etcd_spec(binary, str(home.etcd), port, free_port()), progress, cores)
    children.append(child)
    child.record.address = f"{HOST}:{port}"
    child.record.save(home)

    def healthy() -> bool:
        return b"true" in _get(f"http://{HOST}:{port}/health")

    _wait_for(healthy, [child], READY_S["torch"], "etcd is not healthy")
    child.record.id, child.record.ready = "etcd", True
    child.record.save(home)
    progress.step("etcd", "ready", done=True)
    return port


def _start(home: Home, spec: Spec, progress: Progress, cores: Set[int]) -> _Child:
    progress.step(spec.name, "starting")
    return _Child(*spawn(home, spec.name, spec.role, spec.command, cores))


def _wait_ready(home: Home, children: list[_Child], within_s: float, progress: Progress) -> None:
    """Wait for every ready line."""
    waiting = {child.record.name: child for child in children}
    began = told = time.monotonic()

    def all_ready() -> bool:
        nonlocal told
        if (now := time.monotonic()) - told >= TOLD_S:
            told = now
            for name in waiting:
                progress.step(name, f"starting, {now - began:.0f} s")
        for name, child in list(waiting.items()):
            if said := ready_line(home, name):
                record = child.record
                record.id, record.address = str(said.get("id", name)), str(said.get("address", ""))
                record.metrics, record.ready = str(said.get("metrics", "")), True
                record.save(home)
                progress.step(name, "ready", done=True)
                del waiting[name]
        return not waiting

    _wait_for(all_ready, children, within_s, lambda: f"not ready in time: {', '.join(waiting)}")


def _first_completion(home: Home, url: str, children: list[_Child], within_s: float, progress: Progress) -> str:
    """Wait for /ready, then for one real completion. Returns the served model's name."""
    why = [""]

    def ready() -> bool:
        answer = _get(f"{url}/ready")
        try:
            content = json.loads(answer or b"{}")
        except ValueError:
            content = {}
        if not isinstance(content, dict):
            return False
        missing = [f"{one.get('part')}: {one.get('why')}" for one in content.get("missing") or []]
        why[0] = "; ".join(missing) or answer.decode(errors="replace")[:300] or "no answer"
        return content.get("ready") is True

    progress.step("connections", "waiting")
    _wait_for(ready, children, within_s, lambda: f"the run does not become ready ({why[0]})")
    progress.step("connections", "made", done=True)
    progress.step("first completion", "waiting")
    with _http(ANSWER_S) as client:
        try:
            models = client.get(f"{url}/v1/models").raise_for_status().json()
            served = str(models["data"][0]["id"])
            body = {"model": served, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
            answer = client.post(f"{url}/v1/chat/completions", json=body)
            answer.raise_for_status().json()["choices"][0]["message"]["content"]
        except (httpx.HTTPError, LookupError, ValueError) as error:
            text = error.response.text[:300] if isinstance(error, httpx.HTTPStatusError) else repr(error)
            frontend = _frontend(home)
            raise CliError(
                f"the first completion failed: {text}", f"see {frontend.log}", detail=tail(frontend, LOG_LINES)
            ) from error
    mode = answer.headers.get("x-baton-route", "").split(";")[0]
    progress.step("first completion", f"answered, {mode}" if mode else "answered", done=True)
    return served


def _wait_for(
    condition: Callable[[], bool], children: Iterable[_Child], seconds: float, what: str | Callable[[], str]
) -> None:
    """Wait until the condition holds. Raises CliError when a child dies first (with its last words) or time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        for child in children:
            if (code := child.process.poll()) is not None:
                record = child.record
                raise CliError(
                    f"{record.name} died at start ({_how(code)})", f"see {record.log}", detail=tail(record, LOG_LINES)
                )
        if time.monotonic() > deadline:
            text = what if isinstance(what, str) else what()
            names = ", ".join(str(child.record.log) for child in children)
            raise CliError(f"{text} (waited {seconds:.0f} s)", f"see {names}")
        time.sleep(0.1)


def _url(home: Home) -> str:
    return f"http://{_frontend(home).address}"


def _frontend(home: Home) -> Record:
    return next(record for record in records(home) if record.name == "frontend")


def _get(url: str) -> bytes:
    try:
        with _http(5.0) as client:
            return client.get(url).content
    except httpx.HTTPError:
        return b""


def _http(timeout_s: float) -> httpx.Client:
    # no proxy between us and the loopback
    return httpx.Client(timeout=timeout_s, trust_env=False, headers=authorization())


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
