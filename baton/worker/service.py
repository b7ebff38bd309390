"""The gRPC face of a worker: prefill, decode and merged serve this one, each with its role."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc

from baton.errors import BatonError, Reason
from baton.rpc.codec import peer_from_pb
from baton.rpc.errors import failure
from baton.v1 import registry_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempts
from baton.worker.context import WorkerContext
from baton.worker.embed import Embeddings
from baton.worker.integrity import findings
from baton.worker.offers import Offers
from baton.worker.run import Runs
from baton.worker.sessions import Sessions
from baton.worker.submit import Submissions
from baton.worker.watch import Watchers

MOST_PAUSE_S = 5.0
PAIR_S = 5.0
WARM_S = 2.0
"""How long our side makes progress after a Pair answer, so that the caller can wire its own direction up."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Translates; every idea has a file of its own. Streams write through their context: a generator that is cancelled
    while it is suspended at a `yield` would run its `finally` only when it is collected."""

    def __init__(
        self,
        context: WorkerContext,
        sessions: Sessions,
        attempts: Attempts,
        submissions: Submissions,
        runs: Runs,
        watchers: Watchers,
        offers: Offers,
        embeddings: Embeddings,
        describe: Callable[[], registry_pb2.Worker],
        leave: Callable[[float | None], Awaitable[int]],
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._attempts = attempts
        self._submissions = submissions
        self._runs = runs
        self._watchers = watchers
        self._offers = offers
        self._embeddings = embeddings
        self._describe = describe
        self._leave = leave

    async def Describe(self, request: pb.DescribeRequest, context: object) -> registry_pb2.Worker:
        self._context.check_moving(Reason.ENGINE_FAILED)  # who probes a worker means its engine
        return self._describe()

    async def Session(  # type: ignore[override]
        self, request: pb.SessionRequest, context: grpc.aio.ServicerContext[pb.SessionRequest, pb.Frame]
    ) -> None:
        await self._sessions.serve(request.session, request.frontend, context.write)

    async def Submit(self, request: pb.SubmitRequest, context: object) -> pb.SubmitReply:
        reply = pb.SubmitReply(epoch=self._context.epoch)
        try:
            await self._submissions.submit(request)
        except BatonError as refused:
            reply.failure.CopyFrom(failure(refused))
        return reply

    async def Abort(self, request: pb.AbortRequest, context: object) -> pb.AbortReply:
        attempt = self._attempts.get(request.uid, request.attempt)
        if attempt is None or attempt.session.id != request.session:
            return pb.AbortReply(found=False)
        attempt.abort()
        return pb.AbortReply(found=True)

    async def Pair(self, request: pb.PairRequest, context: object) -> pb.PairReply:
        ours = self._context
        reply = pb.PairReply(peer=ours.peer)
        try:
            if not ours.fingerprint or request.fingerprint != ours.fingerprint:
                raise BatonError(
                    Reason.KV_LAYOUT_MISMATCH, f"layout {request.fingerprint} does not pair with {ours.fingerprint}"
                )
            with ours.transports.lease():
                await ours.transports.pair(peer_from_pb(request.peer), time.monotonic() + PAIR_S)
            ours.background.spawn(self._stay_warm(), "pair warm-up")
        except BatonError as error:
            reply.failure.CopyFrom(failure(error))
        return reply

    async def _stay_warm(self) -> None:
        with self._context.transports.lease():
            await asyncio.sleep(WARM_S)

    async def Watch(  # type: ignore[override]
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WorkerUpdate]
    ) -> None:
        await self._watchers.serve(context.write)

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainReply:
        return pb.DrainReply(remaining=await self._leave(request.deadline_s or None))

    async def CheckIntegrity(self, request: pb.CheckIntegrityRequest, context: object) -> pb.CheckIntegrityReply:
        found = await findings(self._context, self._sessions, self._attempts, self._runs, self._offers)
        return pb.CheckIntegrityReply(findings=self._embeddings.findings() + found)

    async def ClearCache(self, request: pb.ClearCacheRequest, context: object) -> pb.ClearCacheReply:
        return pb.ClearCacheReply(dropped=await self._context.engine.clear_cache())

    async def PauseBatch(self, request: pb.PauseBatchRequest, context: object) -> pb.PauseBatchReply:
        if request.seconds > 0:  # neither NaN nor what is over already
            await self._context.engine.pause_batch(min(request.seconds, MOST_PAUSE_S))
        return pb.PauseBatchReply()

    async def Embed(self, request: pb.EmbedRequest, context: object) -> pb.EmbedReply:
        reply = pb.EmbedReply(epoch=self._context.epoch)
        try:
            reply.vectors.extend(await self._embeddings.embed(request))
        except BatonError as refused:
            self._context.metrics.refused.labels(refused.reason.name).inc()
            reply.failure.CopyFrom(failure(refused))
        return reply
