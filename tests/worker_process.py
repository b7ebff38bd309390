"""Real worker processes for tests, and a small gRPC client that plays the frontend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from baton.kv.keys import Namespace
from baton.v1 import registry_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from tests.stopping import stop

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0
HANG_S = 60.0


class WorkerProcess:
    """One `python -m services.<role>`. Leaving the context ends it, whatever state it is in.

    `mark` is added to its environment, and so to that of its children: by it they can be found. `prefix` goes before
    the command, `python` is that of the environment that its engine is installed in.
    """

    def __init__(
        self,
        role: str,
        id: str,
        directory: Path,
        mark: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        **flags: object,
    ) -> None:
        self.role = role
        self.id = id
        self.log_path = directory / f"{id}.log"
        command = [*prefix, python, "-m", f"services.{role}", "--id", id]
        for name, value in flags.items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(mark or {})}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.address = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.decode())

    def wait_ready(self, limit_s: float = START_S) -> WorkerProcess:
        """Wait for the ready line."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty, ValueError):
                ready = json.loads(self._lines.get(timeout=0.2))
                if ready.get("ready"):
                    self.address = ready["address"]
                    self.metrics = ready["metrics"]
                    return self
            assert self.process.poll() is None, f"{self.id} ended with {self.process.returncode}:\n{self.log()}"
        raise AssertionError(f"{self.id} not ready:\n{self.log()}")

    def signal(self, number: int) -> None:
        """Send a signal to the worker process (not its engine child). After SIGSTOP it stands."""
        if number == signal.SIGSTOP:
            stop(self.process.pid)
        else:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(HANG_S)

    def children(self) -> list[int]:
        """Process ids of the children: the engine."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def stop(self) -> None:
        """End it. Idempotent."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(HANG_S)

    def log(self) -> str:
        """The end of what it wrote."""
        return self.log_path.read_text(errors="replace")[-6000:]

    def __enter__(self) -> WorkerProcess:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass
class Result:
    """What came of one attempt."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[pb.Logprob]] = field(default_factory=dict)
    failure: str = ""
    handback: pb.Handback | None = None
    route: pb.RouteTaken | None = None
    first_route: pb.RouteTaken | None = None
    prompt_logprobs: list[pb.Logprob] = field(default_factory=list)
    events: int = 0
    text: dict[int, str] = field(default_factory=dict)
    """Of an engine that answers text."""
    text_tokens: dict[int, int] = field(default_factory=dict)


class Frontend:
    """One session on one worker."""

    def __init__(self, address: str, card: registry_pb2.ModelCard | None = None, session: str = "") -> None:
        self.address = address
        # A connection of its own: channels to one address would else share one, dead or alive.
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.session = session or f"session-{os.urandom(4).hex()}"
        self.card = card
        self.frames: list[pb.Frame] = []
        self._news = asyncio.Condition()
        self._queues: dict[tuple[str, int], asyncio.Queue[pb.Event | None]] = {}
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> Frontend:
        """Open the session; returns when its first frame has come."""
        described = await self.worker.Describe(pb.DescribeRequest(), timeout=HANG_S)
        self.described = described
        self.card = self.card or described.card
        self._call = self.worker.Session(pb.SessionRequest(session=self.session, frontend="test"))
        opened = asyncio.Event()
        self._reader = asyncio.create_task(self._read(opened))
        await asyncio.wait_for(opened.wait(), HANG_S)
        return self

    async def _read(self, opened: asyncio.Event) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for frame in self._call:
                self.frames.append(frame)
                async with self._news:
                    self._news.notify_all()
                opened.set()
                for event in frame.events:
                    found = self._queues.get((event.uid, event.attempt))
                    if found is not None:
                        found.put_nowait(event)
        for found in self._queues.values():
            found.put_nowait(None)

    async def frame(self, wanted: Callable[[pb.Frame], bool]) -> None:
        """Wait until a frame has come that is `wanted`."""
        async with asyncio.timeout(HANG_S), self._news:
            await self._news.wait_for(lambda: any(map(wanted, self.frames)))

    def root(self) -> bytes:
        """key_0 for this model."""
        assert self.card is not None
        return Namespace(self.card.weights, self.card.tokenizer).root()

    def attempt(self, uid: str, prompt: Sequence[int], *, attempt: int = 1, **sampling: Any) -> pb.Attempt:
        """A greedy attempt that ignores end-of-text, unless told otherwise."""
        choices = sampling.pop("choices", (0,))
        emitted = sampling.pop("emitted", ())
        deadline_s = sampling.pop("deadline_s", 100.0)
        defaults = {"max_tokens": 16, "seed": 7, "top_p": 1.0, "repetition_penalty": 1.0, "ignore_eos": True}
        assert self.card is not None
        return pb.Attempt(
            uid=uid,
            attempt=attempt,
            prompt_ids=prompt,
            emitted_ids=emitted,
            sampling=pb.Sampling(**{**defaults, **sampling}),
            key_root=self.root(),
            deadline=time.time() + deadline_s,
            choices=choices,
            model=self.card.model,
        )

    async def submit(
        self, attempt: pb.Attempt, plan: pb.Plan, *, fallback: pb.Fallback.ValueType = pb.FALLBACK_AUTO
    ) -> pb.SubmitReply:
        """Submit; events are kept for `collect`."""
        self._queues[attempt.uid, attempt.attempt] = asyncio.Queue()
        message = pb.SubmitRequest(session=self.session, attempt=attempt, plan=plan, fallback=fallback, card=self.card)
        return await self.worker.Submit(message, timeout=HANG_S)

    async def events(self, uid: str, attempt: int = 1) -> AsyncIterator[pb.Event]:
        """Events as they come; ends with the session."""
        while (event := await asyncio.wait_for(self._queues[uid, attempt].get(), HANG_S)) is not None:
            yield event

    async def collect(self, uid: str, attempt: int = 1, *, choices: int = 1, emitted: int = 0) -> Result:
        """Everything of one attempt; offsets must follow each other."""
        result = Result()
        async for event in self.events(uid, attempt):
            result.events += 1
            if event.HasField("route"):
                result.first_route = result.first_route or event.route
                result.route = event.route
            if result.events == 1:
                assert event.HasField("route"), "the first event tells the route"
                result.prompt_logprobs = list(event.prompt_logprobs)
            if event.HasField("failure"):
                result.failure = event.failure.reason
                return result
            if event.HasField("handback"):
                result.handback = event.handback
                return result
            tokens = result.tokens.setdefault(event.choice, [])
            if event.WhichOneof("body") == "text":
                text = result.text.setdefault(event.choice, "")
                assert event.offset == len(text), (event, text)
                assert event.text_tokens >= result.text_tokens.get(event.choice, 0)
                result.text[event.choice] = text + event.text
                result.text_tokens[event.choice] = event.text_tokens
            else:
                assert event.offset == emitted + len(tokens), (event, tokens)
            tokens.extend(event.tokens.ids)
            result.logprobs.setdefault(event.choice, []).extend(event.tokens.logprobs)
            if event.finish:
                result.finish[event.choice] = event.finish
            if len(result.finish) == choices:
                assert event.HasField("route"), "the last event tells the route"
                return result
        raise AssertionError(f"the session ended before {uid}/{attempt} did")

    async def run(self, uid: str, prompt: Sequence[int], plan: pb.Plan, **options: Any) -> Result:
        """Submit and collect."""
        fallback = options.pop("fallback", pb.FALLBACK_AUTO)
        attempt = self.attempt(uid, prompt, **options)
        reply = await self.submit(attempt, plan, fallback=fallback)
        assert not reply.HasField("failure"), reply.failure
        return await self.collect(uid, attempt.attempt, choices=len(attempt.choices), emitted=len(attempt.emitted_ids))

    async def abort(self, uid: str, attempt: int = 1) -> bool:
        """Abort; whether it was there."""
        request = pb.AbortRequest(session=self.session, uid=uid, attempt=attempt)
        return (await self.worker.Abort(request, timeout=HANG_S)).found

    async def close(self) -> None:
        """End the session."""
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        await self.channel.close()


@contextlib.asynccontextmanager
async def frontend(worker: WorkerProcess | str) -> AsyncIterator[Frontend]:
    """A frontend with an open session."""
    client = Frontend(worker if isinstance(worker, str) else worker.address)
    try:
        yield await client.open()
    finally:
        await client.close()


async def integrity(address: str) -> list[str]:
    """The worker's findings."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        reply = await stub.CheckIntegrity(pb.CheckIntegrityRequest(), timeout=HANG_S)
        return list(reply.findings)


async def settle(*workers: WorkerProcess) -> float:
    """Wait until every worker is clean; how long the last took. Fails with the findings when one never is."""
    started = time.monotonic()
    for worker in workers:
        found = await integrity(worker.address)
        while found and time.monotonic() < started + HANG_S / 2:
            await asyncio.sleep(0.05)
            found = await integrity(worker.address)
        assert not found, f"{worker.id}: {found}\n{worker.log()}"
    return time.monotonic() - started
