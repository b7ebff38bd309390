"""The sessions with the workers that can stream, opened and retired as the registry changes.

A worker that leaves the registry keeps its session as long as requests run on it: only the session's own loss moves
streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from baton.registry.view import View
from baton.rpc.channel import Channels
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, worker_pb2, worker_pb2_grpc
from services.frontend.metrics import FrontendMetrics
from services.frontend.session import Session

ANSWER_S = 5.0
"""How long a worker that the registry lost may take to say that it is there."""
UNKNOWN_S = 30.0
"""How long a session lives whose worker the registry does not show."""
_STREAMING = (registry_pb2.ROLE_DECODE, registry_pb2.ROLE_MERGED)


class Sessions:
    """The sessions with every decode and merged worker of one model, opened as workers appear."""

    def __init__(
        self,
        frontend: str,
        model: str,
        channels: Channels,
        background: Background,
        metrics: FrontendMetrics,
        failed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`channels` are for calls beside sessions, which have connections of their own. `failed` hears the id of each
        worker that was lost or could not be reached, at once."""
        self._channels = channels
        self._failed = failed
        self._frontend = frontend
        self._model = model
        self._background = background
        self._metrics = metrics
        self._live: dict[str, Session] = {}
        self._by_address: dict[str, Session] = {}

    def follow(self, workers: View[registry_pb2.Worker]) -> Callable[[], None]:
        """Open and retire sessions as the registry changes; returns the way to stop following."""
        return workers.subscribe(self._changed)

    def live(self) -> Mapping[str, Session]:
        """Sessions with the workers that the registry shows, by worker id."""
        return self._live

    def to(self, target: worker_pb2.Target) -> Session:
        """The session with a plan's worker; opened now, for a while, if the registry does not show that address."""
        session = self._by_address.get(target.address)
        if session is None or session.retired:
            session = self._open(target.id, target.address)
            self._background.spawn(self._expire(session), f"expire {target.id}")
        return session

    def stub(self, address: str) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        """How a worker is called beside its session, or without one."""
        return worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))

    async def answers(self, worker: registry_pb2.Worker) -> bool:
        """Whether a worker that the registry lost is there all the same. Raises AioRpcError when it cannot be asked."""
        session = self._live.get(worker.id)
        if session is not None and session.connected and session.epoch == worker.epoch:
            return True
        channels = Channels()  # a new connection: the old one may be what is wrong
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(channels.get(worker.address))
            described = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
            return described.epoch == worker.epoch
        finally:
            await channels.close()

    def _changed(self, id: str, worker: registry_pb2.Worker | None) -> None:
        known = self._live.get(id)
        if worker is not None and (worker.role not in _STREAMING or worker.model != self._model):
            worker = None
        if known is not None and (worker is None or worker.address != known.address):
            del self._live[id]
            known.retire()
        if worker is not None and id not in self._live:
            session = self._by_address.get(worker.address)
            if session is None or session.retired or session.worker != id:
                session = self._open(id, worker.address)
            self._live[id] = session
        elif worker is not None:
            self._live[id].retry()

    def _open(self, id: str, address: str) -> Session:
        session = Session(id, address, self._frontend, self._metrics, self._failed)
        self._by_address[address] = session
        self._background.spawn(self._keep(session), f"session {id}")
        return session

    async def _keep(self, session: Session) -> None:
        try:
            await session.run()
        finally:
            if self._by_address.get(session.address) is session:
                del self._by_address[session.address]

    async def _expire(self, session: Session) -> None:
        """A plan may know a worker before the registry shows it here, or after it has gone for good."""
        await asyncio.sleep(UNKNOWN_S)
        if self._live.get(session.worker) is not session:
            session.retire()
