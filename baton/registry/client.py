"""A small etcd v3 client on grpc.aio: several endpoints, deadlines everywhere, failover.

Every call here may be sent twice (an attempt that timed out may still commit later), so callers only write what is
idempotent or compare-and-swap. Refusals by etcd itself (`EtcdRefused`) are not retried; silence is, on the next
endpoint.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
from grpc import aio

from baton.errors import BatonError, Reason
from baton.registry.backoff import Backoff
from baton.v1 import etcd_pb2 as pb
from baton.v1 import etcd_pb2_grpc as stubs

ANSWER_S = 5.0
"""How long a call tries, over all endpoints."""
ATTEMPT_S = 2.0
"""How long one endpoint may take before the next is tried."""

_CHANNEL_OPTIONS = [
    # etcd answers pings more frequent than 5 s, or without a stream, with GOAWAY.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Without this a lost ping is noticed after 60 s, whatever the keep-alive time-out says.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
_SILENCE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]


class EtcdRefused(Exception):
    """etcd answered and said no; `status` is its gRPC status."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{status.name}: {details}")
        self.status = status


@dataclass(frozen=True)
class Credentials:
    """An etcd user, when authentication is on."""

    user: str
    password: str


@dataclass(frozen=True)
class RegistryState:
    """Whether etcd answered last time, and since when (unix seconds) that has been so."""

    connected: bool
    since: float


class _Endpoint:
    """One etcd member: a lazy channel (grpc.aio binds it to the running loop) and its stubs."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self.kv = stubs.KVStub(self.channel)
        self.lease = stubs.LeaseStub(self.channel)
        self.watch = stubs.WatchStub(self.channel)
        self.auth = stubs.AuthStub(self.channel)


class EtcdClient:
    """Unary calls with failover, keep-alives, and watch streams. One for each process; `close` it."""

    def __init__(self, endpoints: Sequence[str], credentials: Credentials | None = None) -> None:
        """`endpoints` are host:port; http:// in front is allowed."""
        self._addresses = [e.strip().removeprefix("http://").rstrip("/") for e in endpoints if e.strip()]
        if not self._addresses:
            raise BatonError(Reason.INVALID_REQUEST, "no etcd endpoint: give host:port, comma separated", param="etcd")
        # A fleet that starts together must not choose the same member.
        random.shuffle(self._addresses)
        self._endpoints: dict[str, _Endpoint] = {}
        self._current = 0
        self._credentials = credentials
        self._token: str | None = None
        self._state = RegistryState(False, time.time())
        self._closed = False

    @property
    def state(self) -> RegistryState:
        """Whether etcd answered the last call."""
        return self._state

    async def close(self) -> None:
        """Close every channel; later calls fail."""
        self._closed = True
        for endpoint in self._endpoints.values():
            await endpoint.channel.close(None)
        self._endpoints.clear()

    async def get(self, key: bytes) -> pb.KeyValue | None:
        """The key as it is now (linearizable), or None."""
        reply = await self._call(lambda e, m, t: e.kv.Range(pb.RangeRequest(key=key), metadata=m, timeout=t))
        return reply.kvs[0] if reply.kvs else None

    async def list(self, prefix: bytes) -> tuple[dict[bytes, bytes], int]:
        """Every key under `prefix` with its value, and the store's revision of that moment (linearizable)."""
        request = pb.RangeRequest(key=prefix, range_end=prefix_end(prefix))
        reply = await self._call(lambda e, m, t: e.kv.Range(request, metadata=m, timeout=t))
        return {kv.key: kv.value for kv in reply.kvs}, reply.header.revision

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        """Write whatever is there now. Raises EtcdRefused (NOT_FOUND) when the lease is gone."""
        request = pb.PutRequest(key=key, value=value, lease=lease)
        await self._call(lambda e, m, t: e.kv.Put(request, metadata=m, timeout=t))

    async def put_if(self, key: bytes, value: bytes, lease: int, mod_revision: int) -> bool:
        """Write only if the key is still at `mod_revision` (0: absent). False when it is not."""
        request = pb.TxnRequest(
            compare=[pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=mod_revision)],
            success=[pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))],
        )
        reply = await self._call(lambda e, m, t: e.kv.Txn(request, metadata=m, timeout=t))
        return bool(reply.succeeded)

    async def delete(self, key: bytes) -> None:
        """Remove the key; fine when it is not there."""
        await self._call(lambda e, m, t: e.kv.DeleteRange(pb.DeleteRangeRequest(key=key), metadata=m, timeout=t))

    async def compact(self, revision: int) -> None:
        """Forget history before `revision`."""
        await self._call(lambda e, m, t: e.kv.Compact(pb.CompactionRequest(revision=revision), metadata=m, timeout=t))

    async def grant(self, ttl_s: int) -> int:
        """A new lease of `ttl_s` seconds. We choose its id, so a repeated attempt grants the same one."""
        lease = random.getrandbits(62) | 1
        request = pb.LeaseGrantRequest(ttl=ttl_s, id=lease)
        try:
            await self._call(lambda e, m, t: e.lease.LeaseGrant(request, metadata=m, timeout=t))
        except EtcdRefused as refused:
            if "already exists" not in str(refused):
                raise
        return lease

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease once; returns its seconds to live, 0 when it is gone.

        A stream of one message: the same failover as every call, and no stream to watch over while idle.
        """

        async def once(endpoint: _Endpoint, metadata: Metadata, timeout_s: float) -> int:
            # An iterator, not `write` and `done_writing`: a call that breaks between these raises what is no RpcError.
            call = endpoint.lease.LeaseKeepAlive(
                iter([pb.LeaseKeepAliveRequest(id=lease)]), metadata=metadata, timeout=timeout_s
            )
            try:
                reply = await call.read()
                if not isinstance(reply, pb.LeaseKeepAliveResponse):  # EOF: the status says why
                    raise _Ended(await call.code(), await call.details())
                return max(0, reply.ttl)
            except asyncio.InvalidStateError as ended:  # the call broke between two of these steps
                raise _Ended(await call.code(), await call.details()) from ended
            finally:
                call.cancel()

        return await self._call(once)

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; fine when it is gone already."""
        try:
            request = pb.LeaseRevokeRequest(id=lease)
            await self._call(lambda e, m, t: e.lease.LeaseRevoke(request, metadata=m, timeout=t))
        except EtcdRefused as refused:
            if refused.status is not grpc.StatusCode.NOT_FOUND:
                raise

    async def watch(self, prefix: bytes, start_revision: int) -> AsyncGenerator[pb.WatchResponse, None]:
        """Responses of one watch, the `created` one first, until it breaks.

        Ends by raising: EtcdRefused when etcd cancels it (compaction), BatonError REGISTRY_UNAVAILABLE when the member
        is lost or has no leader. The next call goes to the next endpoint. Close the iterator to end the stream.
        """
        endpoint = self._endpoint()
        call = None
        try:
            metadata = (*await self._metadata(endpoint, ATTEMPT_S), ("hasleader", "true"))
            call = endpoint.watch.Watch(metadata=metadata)  # type: ignore[call-arg]
            create = pb.WatchCreateRequest(
                key=prefix, range_end=prefix_end(prefix), start_revision=start_revision, progress_notify=True
            )
            async with asyncio.timeout(ATTEMPT_S):
                await call.write(pb.WatchRequest(create_request=create))
                response = await call.read()
            while isinstance(response, pb.WatchResponse):
                if response.canceled:
                    code = grpc.StatusCode.OUT_OF_RANGE if response.compact_revision else grpc.StatusCode.ABORTED
                    raise EtcdRefused(code, response.cancel_reason or f"compacted at {response.compact_revision}")
                self._contact(True)
                yield response
                response = await call.read()
            raise BatonError(
                Reason.REGISTRY_UNAVAILABLE, f"etcd {endpoint.address} ended the watch: {await call.details()}"
            )
        except (aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as broken:
            self._next_endpoint(endpoint)
            self._token = None
            details = broken.details() if isinstance(broken, aio.AioRpcError) else str(broken)
            raise BatonError(Reason.REGISTRY_UNAVAILABLE, f"etcd {endpoint.address} lost: {details}") from broken
        finally:
            if call is not None:
                call.cancel()

    async def _call(self, send: Callable[[_Endpoint, Metadata, float], Awaitable[T]]) -> T:
        """Send to the current endpoint, then to the others, round after round, until `ANSWER_S` is over."""
        give_up = time.monotonic() + ANSWER_S
        backoff = Backoff(0.05, 1.0)
        silent = 0
        while True:
            endpoint = self._endpoint()
            last = ""
            try:
                timeout_s = max(0.05, min(ATTEMPT_S, give_up - time.monotonic()))
                reply = await send(endpoint, await self._metadata(endpoint, timeout_s), timeout_s)
                self._contact(True)
                return reply
            except (aio.AioRpcError, _Ended) as error:
                code, last = error.code(), error.details() or ""
                if code is grpc.StatusCode.UNAUTHENTICATED and self._token is not None:
                    self._token = None  # tokens end with time and with etcd's restart; a refused login raises below
                elif code not in _SILENCE:
                    self._contact(True)
                    raise EtcdRefused(code, last) from error
                else:
                    self._next_endpoint(endpoint)
                silent += 1
            if silent % len(self._addresses) == 0:
                self._contact(False)
                delay = backoff.next()
                if time.monotonic() + delay >= give_up:
                    raise BatonError(
                        Reason.REGISTRY_UNAVAILABLE,
                        f"etcd at {', '.join(sorted(self._addresses))} did not answer within {ANSWER_S:g} s: {last}",
                    )
                await asyncio.sleep(delay)

    async def _metadata(self, endpoint: _Endpoint, timeout_s: float) -> Metadata:
        if self._credentials is None:
            return ()
        if self._token is None:
            request = pb.AuthenticateRequest(name=self._credentials.user, password=self._credentials.password)
            reply = await endpoint.auth.Authenticate(request, timeout=timeout_s)
            self._token = reply.token
        return (("token", self._token),)

    def _endpoint(self) -> _Endpoint:
        if self._closed:
            raise BatonError(Reason.REGISTRY_UNAVAILABLE, "the registry client is closed")
        address = self._addresses[self._current]
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            endpoint = self._endpoints[address] = _Endpoint(address)
        return endpoint

    def _next_endpoint(self, failed: _Endpoint) -> None:
        # Calls in flight fail together: only the first of them moves on.
        if self._addresses[self._current] == failed.address:
            self._current = (self._current + 1) % len(self._addresses)

    def _contact(self, connected: bool) -> None:
        if connected != self._state.connected:
            self._state = RegistryState(connected, time.time())


class _Ended(Exception):
    """A stream ended before its answer; speaks as AioRpcError does."""

    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


def prefix_end(prefix: bytes) -> bytes:
    """The smallest key after every key that starts with `prefix` (etcd's `range_end`); b"\\0" when there is none."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"
