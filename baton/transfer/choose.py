"""Which transport carries the reads of a pair.

nixl   when both sides have it, and they are on one host or both have RDMA
tcp    otherwise, when both have it (measured: 2-5 GB/s between processes of one host, NIXL over TCP 0.8-1.2)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from baton.errors import BatonError, Reason


@dataclass(frozen=True)
class Endpoint:
    """What the choice depends on: where a process runs and which transports it told of (the keys of its metadata)."""

    host: str
    rdma: bool
    transports: Collection[str]


@dataclass(frozen=True)
class Choice:
    """The transport of a pair and why, in words that can be shown."""

    transport: str
    why: str


def choose(ours: Endpoint, theirs: Endpoint) -> Choice:
    """The transport by which we read from them. Raises BatonError(KV_TRANSFER_FAILED) when there is none in common."""
    shared = set(ours.transports) & set(theirs.transports)
    if "nixl" in shared:
        if ours.host == theirs.host:
            return Choice("nixl", "same host")
        if ours.rdma and theirs.rdma:
            return Choice("nixl", "RDMA on both sides")
        if "tcp" not in shared:
            return Choice("nixl", "no tcp in common")
    if "tcp" in shared:
        if "nixl" in shared:
            return Choice("tcp", "other host, no RDMA")
        lacking = "here" if "nixl" not in ours.transports else "there"
        return Choice("tcp", f"no nixl {lacking}")
    raise BatonError(
        Reason.KV_TRANSFER_FAILED,
        f"no transport in common: we have {sorted(ours.transports)}, they have {sorted(theirs.transports)}",
    )


def has_rdma() -> bool:
    """Whether an active InfiniBand or RoCE port is here."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return any("ACTIVE" in port.read_text() for port in ports)
