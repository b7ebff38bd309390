"""Where inputs are embedded: in groups, each on the worker that the router names, on another one when that fails.

Of a plan with two workers it is the prefill worker's work: embeddings are prompts without an output. An answer is a
function of the input alone, so a group that was lost is simply made again. In the batch lane a group waits for its turn
before each attempt, gives its place up when others want it, and is never failed for having waited.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import grpc
import structlog

from baton.engine.needs import EMBEDDINGS
from baton.errors import BatonError, Reason
from baton.rpc.errors import from_failure, from_rpc
from baton.v1 import router_pb2, worker_pb2
from services.frontend.lately import AWAY_S, LONG_AWAY_S
from services.frontend.request import Backend
from services.frontend.turn import NO_PLACE, Asking, Turn, turned_away

GROUP_INPUTS = 64
GROUP_TOKENS = 2048
"""Of a group, unless one input alone has more."""
GROUPS_AT_ONCE = 4
MAX_FAILURES = 6
"""Attempts at one group that may be lost; what is refused was none."""
PATIENCE_S = 3.0
"""How long a group waits for a worker when none can take it, from the start and from each loss."""
_RETRY_S = (0.1, 1.0)

_log = structlog.get_logger()


@dataclass(frozen=True)
class Group:
    """Some inputs of one request, side by side."""

    uid: str
    inputs: Sequence[Sequence[int]]

    @property
    def tokens(self) -> int:
        """Of all inputs."""
        return sum(len(ids) for ids in self.inputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest input."""
        return max(len(ids) for ids in self.inputs)


def grouped(uid: str, inputs: Sequence[Sequence[int]]) -> list[Group]:
    """Inputs in order, in groups of at most `GROUP_INPUTS` and about `GROUP_TOKENS`."""
    groups: list[list[Sequence[int]]] = []
    tokens = 0
    for ids in inputs:
        if not groups or len(groups[-1]) >= GROUP_INPUTS or tokens + len(ids) > GROUP_TOKENS:
            groups.append([])
            tokens = 0
        groups[-1].append(ids)
        tokens += len(ids)
    return [Group(f"{uid}-{i}", group) for i, group in enumerate(groups)]


async def embed(
    backend: Backend,
    uid: str,
    inputs: Sequence[Sequence[int]],
    context: int,
    deadline: float,
    turns: Callable[[int], Turn] | None = None,
) -> list[bytes]:
    """The vector (f32, little-endian) of each input, in order. `context`: tokens that a worker takes; `deadline` in
    Unix seconds; `turns`: in the batch lane. Raises the BatonError of the first group that cannot be made; the others
    are then stopped."""
    few = asyncio.Semaphore(GROUPS_AT_ONCE)

    async def one(group: Group) -> list[bytes]:
        async with few:
            return await _Placed(backend, group, context, deadline, turns(1) if turns is not None else None).run()

    tasks = [asyncio.create_task(one(group), name=f"embed {group.uid}") for group in grouped(uid, inputs)]
    try:
        return [vector for vectors in await asyncio.gather(*tasks) for vector in vectors]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Placed:
    """One group until it is made; `turn`: in the batch lane."""

    def __init__(self, backend: Backend, group: Group, context: int, deadline: float, turn: Turn | None) -> None:
        self._backend = backend
        self._group = group
        self._context = context
        self._deadline = deadline
        self._turn = turn
        self._exclude: set[str] = set()
        self._attempts = 0
        self._tokens = group.tokens
        """What the router is told: all of the group, or the least that a worker must have room for."""
        self._asking: asyncio.Task[list[bytes]] | None = None
        if turn is not None:
            # It generates nothing, so it never only generates: whoever wants the worker finds it left.
            turn.bind(Asking(self._give_way, lambda: False, [EMBEDDINGS], lambda: self._group.longest))

    async def run(self) -> list[bytes]:
        """The group's vectors. Raises the last BatonError when no worker makes them."""
        try:
            return await self._run()
        finally:
            if self._turn is not None:
                self._turn.leave()

    async def _run(self) -> list[bytes]:
        low, high = _RETRY_S
        patience, losses = time.monotonic() + PATIENCE_S, 0
        failed: BatonError | None = None
        while True:
            try:
                target = await self._plan()
            except BatonError as error:
                if await self._turned_away(error):
                    continue
                if not error.reason.retryable or time.time() >= self._deadline:
                    raise
                if time.monotonic() > patience:
                    raise (failed or error) from error
                self._look_wider()
                await asyncio.sleep(low * random.uniform(0.5, 1.0))
                low = min(high, low * 2)
                continue
            try:
                made = await self._ask_until_wanted(target)
            except BatonError as error:
                if await self._turned_away(error):
                    continue
                self._backend.metrics.attempt_failures.labels(error.reason.name).inc()
                failed = error
                if error.reason not in NO_PLACE:
                    losses += 1
                    patience = time.monotonic() + PATIENCE_S
                if not error.reason.retryable or losses >= MAX_FAILURES:
                    raise
                self._exclude.add(target.id)
                _log.info("embeddings move", uid=self._group.uid, lost=target.id, error=str(error))
            else:
                if made is not None:
                    return made

    async def _turned_away(self, error: BatonError) -> bool:
        away = await turned_away(self._turn, error, self._deadline)
        if away:
            self._look_wider()
        return away

    def _look_wider(self) -> None:
        """Whoever was left out may be back by now, and less room may do."""
        self._tokens = self._group.longest
        self._exclude.clear()

    async def _plan(self) -> worker_pb2.Target:
        if self._turn is None:
            return await self._route((), AWAY_S)
        while True:
            others = await self._turn.wait()
            target = await self._route(others, LONG_AWAY_S)
            if self._turn.placed:
                return target

    async def _route(self, others: Collection[str], away_s: float) -> worker_pb2.Target:
        backend = self._backend
        request = router_pb2.RouteRequest(
            uid=self._group.uid,
            attempt=self._attempts,
            model=backend.card.model,
            prompt_tokens=min(self._tokens, self._context - 1) or 1,
            deadline=self._deadline,
            exclude=sorted({*self._exclude, *others}),
            needs=[EMBEDDINGS],
        )
        try:
            plan = await backend.router.route(request, away_s)
        except BatonError as error:
            if error.reason is Reason.INVALID_REQUEST:
                message = f"Nobody who serves this model makes embeddings: {error.message}"
                raise BatonError(Reason.INVALID_REQUEST, message, param="model") from error
            raise
        return plan.prefill if plan.mode == worker_pb2.MODE_DISAGGREGATED else plan.worker

    async def _ask(self, target: worker_pb2.Target) -> list[bytes]:
        backend, group = self._backend, self._group
        self._attempts += 1
        backend.metrics.attempts.inc()
        request = worker_pb2.EmbedRequest(
            uid=group.uid,
            inputs=[worker_pb2.TokenIds(ids=ids) for ids in group.inputs],
            deadline=self._deadline,
            card=backend.card,
            batch=self._turn is not None,
        )
        left = self._deadline - time.time()
        if left <= 0:
            raise BatonError(Reason.DEADLINE_EXCEEDED, "The request took longer than it may.")
        try:
            reply = await backend.sessions.stub(target.address).Embed(request, timeout=left)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                backend.router.failed(target.id)
            raise from_rpc(error, Reason.SESSION_LOST) from error
        if reply.HasField("failure"):
            raise from_failure(reply.failure)
        if len(reply.vectors) != len(group.inputs):
            raise BatonError(
                Reason.INTERNAL, f"{target.id} made {len(reply.vectors)} of {len(group.inputs)} embeddings"
            )
        return list(reply.vectors)

    async def _ask_until_wanted(self, target: worker_pb2.Target) -> list[bytes] | None:
        """The vectors; None when the place was taken away."""
        self._asking = asyncio.create_task(self._ask(target), name=f"embed {self._group.uid}")
        try:
            await asyncio.wait({self._asking})
            return None if self._asking.cancelled() else self._asking.result()
        finally:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
            self._asking = None

    def _give_way(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
