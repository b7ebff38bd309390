"""Channels to other processes: one for each address, with keepalive and message limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc

from baton.rpc.limits import CLIENT_OPTIONS

RETIRED_S = 3600.0
"""No call lasts longer: what is still open on a retired channel then is cancelled."""


class Registered(Protocol):
    """A process that can be called, as the registry has it."""

    @property
    def address(self) -> str:
        """Its host:port."""

    @property
    def epoch(self) -> int:
        """Another one for each process."""


class Followed(Protocol):
    """A registry's view of one kind."""

    def subscribe(self, callback: Callable[[str, Registered | None], None], /) -> object:
        """Call with the id and what it is now (None: gone), for each that is there and for each change."""


class Channels:
    """A cache of channels, owned by one process's wiring."""

    def __init__(self) -> None:
        self._open: dict[str, grpc.aio.Channel] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self._closed = False

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` (host:port), opened when first asked for. It connects by itself, lazily."""
        channel = self._open.get(address)
        if channel is None:
            channel = self._open[address] = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        return channel

    async def connected(self, address: str) -> None:
        """Wait for a connection to `address`, also when its channel is retired meanwhile. For ever: how long to wait,
        and on which clock, is the caller's."""
        while True:
            try:
                return await self.get(address).channel_ready()
            except grpc.aio.UsageError:
                if self._closed:
                    raise

    def follow(self, view: Followed) -> None:
        """Retire what leads to a process that the view says is gone, and what led to an address before another process
        came to it, under whatever id."""
        known: dict[str, Registered] = {}

        def changed(id: str, now: Registered | None) -> None:
            before = known.pop(id, None)
            if now is not None:
                known[id] = now
                if before is not None and before.epoch == now.epoch:
                    return
                self.retire(now.address)
            if before is not None and before.address not in {other.address for other in known.values()}:
                self.retire(before.address)

        view.subscribe(changed)

    def retire(self, address: str) -> None:
        """Whoever was at `address` has left, or another process is there now. Who calls next gets a new channel, which
        connects at once: the old one may be in the pause after attempts that failed. Calls in flight end by themselves.
        """
        channel = self._open.pop(address, None)
        if channel is not None:
            task = asyncio.create_task(channel.close(RETIRED_S), name=f"retire {address}")
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    async def drop(self, address: str) -> None:
        """Close the channel to a peer that is gone; calls in flight end as cancelled. No-op for an unknown address."""
        channel = self._open.pop(address, None)
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        """Close every channel. What is in flight on a retired one is its caller's to end."""
        self._closed = True
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)
        for address in list(self._open):
            await self.drop(address)
