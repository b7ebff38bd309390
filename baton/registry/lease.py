"""One key, kept in etcd under a lease of its own for as long as its owner lives.

Level-triggered: each beat renews the lease and compares the key with what it should be. So one loop covers the first
registration, updates, a lost lease (etcd's restart with an empty directory, our own SIGSTOP), a key somebody deleted,
and a write that timed out and committed late. Every write is compare-and-swap on the revision just read.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto

import grpc
import structlog

from baton.errors import BatonError
from baton.registry.backoff import Backoff
from baton.registry.client import EtcdClient, EtcdRefused
from baton.v1 import etcd_pb2 as pb

LEASE_S = 10
"""Seconds a process may be silent before its key goes."""
GOODBYE = b""
"""Written before a key is removed on purpose, so that watchers can tell leaving from falling silent."""
GOODBYE_S = 3.0

_log = structlog.get_logger()


class Policy(Enum):
    """Whose value stands when the key is there already."""

    REPLACE = auto()
    """Ours: a restarted process takes its id back from the one before. Once ours was seen and replaced by a later
    process of the same id, we stand back until that one is gone (or two would fight for ever)."""
    FIRST = auto()
    """Theirs: the first writer's value stands for as long as anyone keeps it."""


class LeasedKey:
    """Keeps `key` = `value`. `run` is the loop (cancel it to stop), `leave` the way out."""

    def __init__(self, client: EtcdClient, key: bytes, value: bytes, policy: Policy = Policy.REPLACE) -> None:
        self.key = key
        self.value = value
        self.policy = policy
        self.standing: bytes | None = None
        """What etcd holds, as of the last beat; None before the first."""
        self.leases_lost = 0
        self._client = client
        self._lease = 0
        self._was_ours = False
        self._changed = asyncio.Event()
        self._standing_known = asyncio.Event()

    def set(self, value: bytes) -> None:
        """Write this value from now on; the loop does it at once."""
        self.value = value
        self._standing_known.clear()
        self._changed.set()

    async def settled(self, timeout_s: float) -> bool:
        """Wait until etcd holds a value for the key and we know which; False when it takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._standing_known.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Renew and compare, for ever. Only cancellation ends it."""
        backoff = Backoff(0.2, 3.0)
        while True:
            self._changed.clear()
            try:
                await self._beat()
                backoff.reset()
                delay = LEASE_S / 3
            except Exception as error:  # whatever it is: who is not renewed is gone, and must come back
                if not isinstance(error, (BatonError, EtcdRefused)):
                    _log.exception("renewing a registration failed", key=self.key.decode())
                self._standing_known.clear()
                delay = backoff.next()
                _log.warning(
                    "registration not renewed", key=self.key.decode(), error=str(error), again_s=round(delay, 2)
                )
            try:
                async with asyncio.timeout(delay):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def leave(self) -> None:
        """Say goodbye and end the lease; call after `run` was cancelled. Never raises: a lease ends by itself."""
        lease, self._lease = self._lease, 0
        if not lease:
            return
        try:
            async with asyncio.timeout(GOODBYE_S):
                current = await self._client.get(self.key)
                if current is not None and current.lease == lease and self.policy is Policy.REPLACE:
                    await self._client.put_if(self.key, GOODBYE, lease, current.mod_revision)
                # Revoking also stops a write of ours that is still on its way.
                await self._client.revoke(lease)
        except (BatonError, EtcdRefused, TimeoutError) as error:
            _log.warning("left without goodbye", key=self.key.decode(), lease_s=LEASE_S, error=str(error))

    async def _beat(self) -> None:
        if self._lease and not await self._client.keep_alive(self._lease):
            self._lose_lease()
        if not self._lease:
            self._lease = await self._client.grant(LEASE_S)
        current = await self._client.get(self.key)
        try:
            while self._must_write(current):
                value = self.value
                if await self._client.put_if(self.key, value, self._lease, current.mod_revision if current else 0):
                    self._was_ours = True
                    self.standing = value
                    break
                current = await self._client.get(self.key)
            else:
                self.standing = current.value if current else None
        except EtcdRefused as refused:
            if refused.status is not grpc.StatusCode.NOT_FOUND:
                raise
            self._lose_lease()
            raise
        if self.standing is not None and (self.policy is Policy.FIRST or self.standing == self.value):
            self._standing_known.set()

    def _must_write(self, current: pb.KeyValue | None) -> bool:
        if current is None or (current.lease == self._lease and current.value != self.value):
            return True
        if current.lease == self._lease or self.policy is Policy.FIRST:
            return False
        if self._was_ours:
            _log.error("another process has registered under this id: standing back", key=self.key.decode())
            return False
        return True

    def _lose_lease(self) -> None:
        self._lease = 0
        self.leases_lost += 1
        _log.warning("lease lost: registering again", key=self.key.decode())
