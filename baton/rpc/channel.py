"""Channels to other processes: one for each address, with keepalive and message limits."""

from __future__ import annotations

import grpc

from baton.rpc.limits import CLIENT_OPTIONS


class Channels:
    """A cache of channels, owned by one process's wiring."""

    def __init__(self) -> None:
        self._open: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` (host:port), opened when first asked for. It connects by itself, lazily."""
        channel = self._open.get(address)
        if channel is None:
            channel = self._open[address] = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        return channel

    async def drop(self, address: str) -> None:
        """Close the channel to a peer that is gone; calls in flight end as cancelled. No-op for an unknown address."""
        channel = self._open.pop(address, None)
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        """Close every channel."""
        for address in list(self._open):
            await self.drop(address)
