"""A node's KV store below its device's cache: host memory, which others read over the node's link, and a disk under it.

What a prompt computed is written behind into host memory at once, as Baton's workers offer it. What host memory evicts
is written to the disk, what the disk evicts is gone. A block that is read comes up into host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from bench.sim.cache import Cache

HOST, NVME = "host", "nvme"


@dataclass(frozen=True)
class Tiers:
    """A store for each node, in tokens and bytes per second; a tier of no tokens is not there. `local_bytes_s` is the
    way from its host memory to its own device, which no network shares; `read_s` goes before any load (README.md)."""

    host_tokens: int = 600_000
    nvme_tokens: int = 6_000_000
    local_bytes_s: float = 50e9
    nvme_bytes_s: float = 6e9
    read_s: float = 0.005


class Change(NamedTuple):
    """What a tier holds from now on, and what it holds no more."""

    tier: str
    stored: Sequence[bytes]
    removed: Sequence[bytes]


class Store:
    """Two LRU caches, `host` and `nvme` blocks large. `disk_free` is when the disk has read what was asked of it."""

    def __init__(self, host: int, nvme: int) -> None:
        self._host, self._nvme = Cache(host), Cache(nvme)
        self.disk_free = 0.0

    def run(self, keys: Sequence[bytes]) -> list[str]:
        """On which tier each of `keys` lies, the best when on both, from the first on until one is not here."""
        return list(takewhile(bool, (self.tier(key) for key in keys)))

    def tier(self, key: bytes) -> str:
        """The best tier that `key` lies on; empty when it is not here."""
        return HOST if key in self._host else NVME if key in self._nvme else ""

    def hold(self, keys: Sequence[bytes]) -> list[Change]:
        """Have the `keys` of a prompt in host memory: written behind, or read by somebody."""
        stored, removed = self._host.use(keys)
        found = [Change(HOST, stored, removed)]
        if removed:  # the least recently used first; `use` wants that one last
            found.append(Change(NVME, *self._nvme.use(removed[::-1])))
        return [change for change in found if change.stored or change.removed]

    def demote(self, keys: Sequence[bytes]) -> list[Change]:
        """The device evicted `keys`, the least recently used first: what is on no tier here comes into host memory."""
        return self.hold([key for key in reversed(keys) if not self.tier(key)])

    def held(self) -> list[Change]:
        """All that is here, as the changes that lead there."""
        return [Change(HOST, self._host.keys(), ()), Change(NVME, self._nvme.keys(), ())]

    def die(self) -> list[Change]:
        """The machine is down: its memory is lost, and its disk can be read by nobody until it is back (`held`)."""
        self.disk_free = 0.0
        return [Change(HOST, (), self._host.clear()), Change(NVME, (), self._nvme.keys())]
