"""A prefill worker that does what a test tells it: the peer that fails, lies or stays silent on purpose.

It speaks the real protocol over real gRPC and serves real bytes over the tcp transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from baton.kv.arena import Arena
from baton.kv.handle import Handle, checksum
from baton.kv.keys import block_keys, chain
from baton.rpc.codec import handle_from_pb, handle_to_pb, peer_from_pb, peer_to_pb
from baton.transfer.port import Peer
from baton.transfer.tcp.transport import TcpTransport
from baton.transfer.transports import Transports
from baton.v1 import registry_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb

OWNER = "prefill-scripted"
EPOCH = 77
ARENA_BYTES = 16 << 20
HANG_S = 60.0

Write = Callable[[pb.RunEvent], Awaitable[None]]
Script = Callable[[pb.RunRequest, Write], Awaitable[None]]


@dataclass
class Computed:
    """A prompt's KV in our arena, and what the real prefill drew from it."""

    handles: list[Handle]
    first: list[pb.FirstToken]


class ScriptedPrefill(worker_pb2_grpc.PrefillServiceServicer):
    """`script` answers each Run; `open_runs` counts those whose caller has not closed yet."""

    def __init__(self) -> None:
        self.arena = Arena.create(ARENA_BYTES)
        self.transports = Transports([TcpTransport()])
        self.script: Script = self._refuse
        self.requests: list[pb.RunRequest] = []
        self.open_runs = 0
        self.address = ""
        self._used = 0

    async def _refuse(self, request: pb.RunRequest, write: Write) -> None:
        raise NotImplementedError("the test set no script")

    async def Run(self, request: pb.RunRequest, context: grpc.aio.ServicerContext) -> None:
        self.requests.append(request)
        self.open_runs += 1
        try:
            with self.transports.lease():
                await self.script(request, context.write)
        finally:
            self.open_runs -= 1

    @property
    def peer(self) -> Peer:
        """How we are read from."""
        return Peer(OWNER, EPOCH, self.arena.size, self.transports.metadata())

    def target(self) -> pb.Target:
        """For a plan."""
        return pb.Target(id=OWNER, address=self.address)

    def accepted(self) -> pb.RunEvent:
        """The event that opens a run."""
        return pb.RunEvent(accepted=pb.Accepted(peer=peer_to_pb(self.peer)))

    async def compute(self, worker: str, request: pb.RunRequest) -> Computed:
        """Have a real prefill worker compute a prompt, and read its KV into our arena."""
        request.peer.CopyFrom(peer_to_pb(self.peer))
        handles: list[Handle] = []
        async with grpc.aio.insecure_channel(worker) as channel:
            call = worker_pb2_grpc.PrefillServiceStub(channel).Run(request, timeout=HANG_S)
            async for event in call:
                assert not event.HasField("failure"), event.failure
                if event.HasField("accepted"):
                    await self.transports.pair(peer_from_pb(event.accepted.peer), time.monotonic() + HANG_S)
                handles += [handle_from_pb(h) for h in event.blocks.handles]
                if event.HasField("done"):
                    break
            offsets = [self._used + i * handles[0].length for i in range(len(handles))]
            self._used += len(handles) * handles[0].length
            report = await self.transports.read(handles, offsets, time.monotonic() + HANG_S)
            assert report.verified_prefix() == len(handles)
            call.cancel()
        ours = [
            replace(h, owner=OWNER, epoch=EPOCH, generation=1, segments=(replace(h.segments[0], offset=o),))
            for h, o in zip(handles, offsets, strict=True)
        ]
        return Computed([self.signed(h, h.key) for h in ours], list(event.done.first))

    def signed(self, handle: Handle, key: bytes) -> Handle:
        """The same bytes under another key, with the checksum that makes that name right."""
        segment = handle.segments[0]
        payload = self.arena.view(segment.offset, segment.length)
        return replace(handle, key=key, checksum=checksum(key, EPOCH, 1, payload))

    def relabelled(self, computed: Computed, root: bytes, prompt: Sequence[int], block_size: int) -> list[Handle]:
        """These bytes, named as the KV of another prompt of equal length."""
        keys = block_keys(root, prompt, block_size)
        rest = prompt[len(keys) * block_size :]
        if rest:
            keys.append(chain(keys[-1] if keys else root, rest))
        return [self.signed(h, key) for h, key in zip(computed.handles, keys, strict=True)]


def blocks(handles: Sequence[Handle], first_block: int = 0) -> pb.RunEvent:
    """An announcement."""
    return pb.RunEvent(blocks=pb.Blocks(first_block=first_block, handles=[handle_to_pb(h) for h in handles]))


def done(first: Sequence[pb.FirstToken]) -> pb.RunEvent:
    """The end of the computation."""
    return pb.RunEvent(done=pb.Done(first=first))


async def hold() -> None:
    """Keep the lease until the caller closes it."""
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def scripted_prefill() -> AsyncIterator[ScriptedPrefill]:
    """One, serving."""
    prefill = ScriptedPrefill()
    await prefill.transports.start(prefill.arena, OWNER, EPOCH)
    server = grpc.aio.server(options=[("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_ping_strikes", 0)])
    worker_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server)
    prefill.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield prefill
    finally:
        await server.stop(0)
        await prefill.transports.close()


def run_request(attempt: pb.Attempt, worker: registry_pb2.Worker) -> pb.RunRequest:
    """What a decode worker would ask of `worker`."""
    return pb.RunRequest(attempt=attempt, fingerprint=worker.fingerprint, card=worker.card)
