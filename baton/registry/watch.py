"""A live mirror of one prefix: list, watch from there, and on any break list again.

Listing again after every break (a lost member, compaction, no leader, a store that lost its data) makes all of them one
case: what the list lacks is gone, what it has is true. A watch whose member is behind the list's revision, as after a
restart with an empty directory, would wait silently for a revision that may never come, so that counts as a break too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing

import structlog

from baton.errors import BatonError, Reason
from baton.registry.backoff import Backoff
from baton.registry.client import EtcdClient, EtcdRefused
from baton.v1 import etcd_pb2 as pb

_log = structlog.get_logger()


class PrefixWatch:
    """Tells `on_snapshot` every key at each (re)start, and `on_change` each later change (None: deleted), in order."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: bytes,
        on_snapshot: Callable[[Mapping[bytes, bytes]], None],
        on_change: Callable[[bytes, bytes | None], None],
    ) -> None:
        self.prefix = prefix
        self.restarts: dict[str, int] = {}
        """How often the watch broke, by cause: lost, compacted, behind, ended, failed."""
        self._client = client
        self._on_snapshot = on_snapshot
        self._on_change = on_change

    async def run(self) -> None:
        """Mirror for ever. Only cancellation ends it."""
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                await self._once(backoff)
            except Exception as error:  # this loop must not end: the view would be silently old
                cause = _cause(error)
                self.restarts[cause] = self.restarts.get(cause, 0) + 1
                if backoff.worth_telling or cause == "failed":
                    prefix, unknown = self.prefix.decode(), cause == "failed"
                    _log.warning("registry watch broke", prefix=prefix, cause=cause, error=str(error), exc_info=unknown)
            await asyncio.sleep(backoff.next())

    async def _once(self, backoff: Backoff) -> None:
        keys, revision = await self._client.list(self.prefix)
        self._on_snapshot(keys)
        async with aclosing(self._client.watch(self.prefix, revision + 1)) as responses:
            async for response in responses:
                if response.created:
                    if response.header.revision < revision:
                        raise _BehindError(f"listed at revision {revision}, watched at {response.header.revision}")
                    backoff.reset()
                for event in response.events:
                    deleted = event.type == pb.Event.DELETE
                    self._on_change(event.kv.key, None if deleted else event.kv.value)
        raise BatonError(Reason.REGISTRY_UNAVAILABLE, "the watch ended")


class _BehindError(Exception):
    """The member that answers the watch has not reached the list's revision."""


def _cause(error: Exception) -> str:
    match error:
        case BatonError():
            return "lost"
        case EtcdRefused():
            return "compacted" if "compact" in str(error) else "ended"
        case _BehindError():
            return "behind"
        case _:
            return "failed"
