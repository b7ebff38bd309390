"""Every transport of a process over its one arena, as one: reads go by the transport that was chosen for the peer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence

import structlog

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle
from baton.registry.host import machine_id
from baton.transfer.choose import Choice, Endpoint, choose, has_rdma
from baton.transfer.nixl.transport import NixlTransport
from baton.transfer.port import BlockRead, Peer, ReadReport, Transport
from baton.transfer.tcp.transport import TcpTransport

HOST_KEY = "host"
"""Beside the transports' own entries, `metadata` says where we are: `<host id> <rdma 0|1>`."""

log = structlog.get_logger(__name__)


def available(host: str = "127.0.0.1", advertise: str | None = None) -> list[Transport]:
    """What a process offers by default: nixl (dropped at `start` when it cannot be had) and tcp on `host`."""
    return [NixlTransport(host), TcpTransport(host, advertise=advertise)]


def endpoint(metadata: dict[str, bytes]) -> Endpoint:
    """Where a process is and what it offers, from its metadata. One that does not say where is on no known host."""
    where, _, rdma = metadata.get(HOST_KEY, b"").decode(errors="replace").partition(" ")
    return Endpoint(where or "unknown", rdma == "1", frozenset(metadata) - {HOST_KEY})


class Transports:
    """Several transports over one arena. All methods belong to one event loop."""

    def __init__(self, candidates: Sequence[Transport]) -> None:
        self._candidates = candidates
        self._started: dict[str, Transport] = {}
        self._where = b""
        self._choices: dict[str, Choice] = {}
        self.missing: dict[str, str] = {}
        """Transports that could not be started here, and why."""

    async def start(self, arena: Arena, owner: str, epoch: int, *, slot_bytes: int | None = None) -> None:
        """Start each candidate; one that cannot is left out, logged and told in `missing`.

        Raises BatonError(KV_TRANSFER_FAILED) when none can.
        """
        for transport in self._candidates:
            try:
                await transport.start(arena, owner, epoch, slot_bytes=slot_bytes)
            except BatonError as error:
                self.missing[transport.name] = error.message
                log.warning("transport not available", transport=transport.name, why=error.message)
            else:
                self._started[transport.name] = transport
        if not self._started:
            raise BatonError(Reason.KV_TRANSFER_FAILED, f"no transport can be used here: {self.missing}")
        self._where = f"{machine_id()} {int(has_rdma())}".encode()

    def metadata(self) -> dict[str, bytes]:
        """What goes into our registration: `Peer.metadata` of whoever reads from us."""
        return {name: transport.metadata() for name, transport in self._started.items()} | {HOST_KEY: self._where}

    async def pair(self, peer: Peer, deadline: float) -> Choice:
        """Choose the transport for `peer` and pair over it. Idempotent; raises as `Transport.pair`.

        When the chosen one cannot be paired and another would do, that one is taken, and the choice says so.
        """
        ours = endpoint(self.metadata())
        theirs = endpoint(peer.metadata)
        choice = choose(ours, theirs)
        try:
            await self._started[choice.transport].pair(peer, deadline)
        except BatonError as error:
            fallback = self._started.get("tcp")
            if choice.transport == "tcp" or fallback is None or "tcp" not in theirs.transports:
                raise
            if error.reason is not Reason.KV_TRANSFER_FAILED or time.monotonic() >= deadline:
                raise
            log.warning("transport falls back", peer=peer.owner, chosen=choice.transport, why=error.message)
            await fallback.pair(peer, deadline)
            choice = Choice("tcp", f"{choice.transport} failed: {error.message}")
        self._choices[peer.owner] = choice
        return choice

    def choice(self, owner: str) -> Choice | None:
        """The transport that carries reads from that peer and why; None when it is not paired."""
        return self._choices.get(owner)

    async def read(
        self, handles: Sequence[Handle], into: Sequence[int], deadline: float, *, verify: bool = True
    ) -> ReadReport:
        """READ, each handle by its owner's transport; the report as `Transport.read` gives it."""
        groups: dict[str, list[int]] = {}
        for i, handle in enumerate(handles):
            choice = self._choices.get(handle.owner)
            groups.setdefault(choice.transport if choice else "", []).append(i)
        if len(groups) == 1 and "" not in groups:
            return await self._started[next(iter(groups))].read(handles, into, deadline, verify=verify)
        started = time.perf_counter()
        blocks = [BlockRead(h, o, Reason.KV_STALE_EPOCH) for h, o in zip(handles, into, strict=True)]
        groups.pop("", None)
        async with asyncio.TaskGroup() as tasks:
            reads = {
                name: tasks.create_task(
                    self._started[name].read(
                        [handles[i] for i in positions], [into[i] for i in positions], deadline, verify=verify
                    )
                )
                for name, positions in groups.items()
            }
        late: list[int] = []
        settled = None
        total = 0
        for name, task in reads.items():
            part = task.result()
            total += part.bytes
            late.extend(part.late)
            settled = part.settled or settled  # only nixl can be late, so there is at most one
            for i, block in zip(groups[name], part.blocks, strict=True):
                blocks[i] = block
        return ReadReport(blocks, total, time.perf_counter() - started, late, settled)

    def quarantined(self) -> frozenset[int]:
        """Local offsets that late reads of any transport may still write to."""
        return frozenset().union(*(t.quarantined() for t in self._started.values()))

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """While at least one is open, peers can read from us by every transport."""
        with contextlib.ExitStack() as leases:
            for transport in self._started.values():
                leases.enter_context(transport.lease())
            yield

    async def close(self) -> None:
        """Close every transport. Idempotent."""
        self._choices.clear()
        for transport in self._started.values():
            await transport.close()
