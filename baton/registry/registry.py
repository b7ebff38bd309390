"""The registry as the rest of Baton sees it: say that you are here, and see who else is.

Keys: /baton/v1/<cluster>/<kind>/<id>, values the proto in JSON. Nothing here fails because etcd is away: registrations
are retried for ever, views keep the last they saw (`baton.registry.view` says when an entry goes), `state` tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar, cast

import structlog
from google.protobuf import json_format
from google.protobuf.message import Message

from baton.errors import BatonError, Reason
from baton.registry.client import Credentials, EtcdClient, RegistryState
from baton.registry.lease import LeasedKey, Policy
from baton.registry.view import Confirm, View
from baton.registry.watch import PrefixWatch
from baton.v1 import registry_pb2

M = TypeVar("M", bound=Message)
Kind = str
"""workers, kvstores, routers, frontends, models or layouts."""

SHARED = ("models", "layouts")
"""Kinds whose entries are claimed by many and held by one at a time."""

_log = structlog.get_logger()


class Spawner(Protocol):
    """Who owns our loops, when the process has an owner of background tasks."""

    def spawn(self, coro: Coroutine[Any, Any, None], name: str, /) -> asyncio.Task[None]:
        """Run as a task whose failure is seen."""


def encode(message: Message) -> bytes:
    """A message as it lies in etcd: the proto in JSON, the same bytes for the same message."""
    return json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None, sort_keys=True).encode()


class Registration:
    """This process' entry. Kept until `withdraw`."""

    def __init__(self, key: LeasedKey, loop: asyncio.Task[None]) -> None:
        self._key = key
        self._loop = loop

    @property
    def leases_lost(self) -> int:
        """How often the lease had gone and a new one was taken."""
        return self._key.leases_lost

    async def registered(self, timeout_s: float) -> bool:
        """Wait until etcd holds this entry; False when it takes longer (it is still tried for ever)."""
        return await self._key.settled(timeout_s)

    async def update(self, message: Message, timeout_s: float = 2.0) -> bool:
        """Replace the entry. Waits until etcd has it, at most `timeout_s`; False: not yet (it is tried for ever)."""
        self._key.set(encode(message))
        return await self._key.settled(timeout_s)

    async def withdraw(self) -> None:
        """Remove the entry so that viewers see it at once. Idempotent; with etcd away, the lease ends it later."""
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await self._key.leave()


class Registry:
    """One for each process. Use inside a running loop; `close` withdraws everything."""

    def __init__(
        self,
        endpoints: Sequence[str],
        cluster: str,
        background: Spawner | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._client = EtcdClient(endpoints, credentials)
        self._background = background
        self._root = f"/baton/v1/{cluster}"
        self._registrations: list[Registration] = []
        self._claims: dict[str, tuple[LeasedKey, Registration]] = {}
        self._views: dict[Kind, View[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> RegistryState:
        """Whether etcd answered last time, and since when."""
        return self._client.state

    async def start(self) -> None:
        """Ask etcd once, so that `state` is known. Returns whether it answers or not."""
        try:
            await self._client.get(self._key("", "").encode())
        except BatonError as error:
            _log.warning("registry not reachable yet", error=str(error))

    async def register(self, kind: Kind, id: str, message: Message) -> Registration:
        """Keep `message` under the kind and id until `withdraw`; returns at once, whether etcd is there or not."""
        registration = self._keep(LeasedKey(self._client, self._key(kind, id).encode(), encode(message)))
        self._registrations.append(registration)
        return registration

    def view(self, kind: Kind, message_type: type[M], confirm: Confirm[M] | None = None) -> View[M]:
        """The mirror of a kind, one for each kind: later callers share it, and the first one's `confirm`."""
        if kind not in self._views:
            view = self._views[kind] = View(kind, message_type, confirm, shared=kind in SHARED)
            prefix = self._key(kind, "").encode()
            skip = len(prefix)
            watch = PrefixWatch(
                self._client,
                prefix,
                on_snapshot=lambda keys: view.replace({k[skip:].decode(): v for k, v in keys.items()}),
                on_change=lambda key, value: view.change(key[skip:].decode(), value),
            )
            self._spawn(watch.run(), f"view {kind}")
        return cast("View[M]", self._views[kind])

    async def claim_card(self, card: registry_pb2.ModelCard, timeout_s: float = 10.0) -> registry_pb2.ModelCard:
        """The card that stands for this served name: ours, unless another process came first.

        We then help to keep it: a card lives as long as one process that claimed it. Raises BatonError
        REGISTRY_UNAVAILABLE when etcd does not answer in time; claim again then. Claiming again is also right whenever
        the card may have changed hands.
        """
        return await self._claim("models", card.model, card, timeout_s)

    async def claim_layout(
        self, layout: registry_pb2.StandingLayout, timeout_s: float = 10.0
    ) -> registry_pb2.StandingLayout:
        """The KV layout that stands for its model and engine, as `claim_card` is for cards. Raises as that does."""
        return await self._claim("layouts", f"{layout.model}.{layout.engine}", layout, timeout_s)

    async def _claim(self, kind: Kind, id: str, message: M, timeout_s: float) -> M:
        value, path = encode(message), self._key(kind, id)
        key, claim = self._claims.get(path, (None, None))
        if key is None or claim is None or key.value != value:
            key = LeasedKey(self._client, path.encode(), value, Policy.FIRST)
            claim = self._keep(key)
        else:
            key.set(value)  # asks again at once
        if not await claim.registered(timeout_s) or key.standing is None:
            await self._drop_claim(path, claim)
            raise BatonError(Reason.REGISTRY_UNAVAILABLE, f"etcd did not answer about {kind}/{id} in {timeout_s:g} s")
        try:
            standing = json_format.Parse(key.standing, type(message)(), ignore_unknown_fields=True)
        except json_format.ParseError as error:
            await self._drop_claim(path, claim)
            raise BatonError(Reason.REGISTRY_UNAVAILABLE, f"{kind}/{id} in etcd cannot be read: {error}") from error
        if standing == message:
            self._claims[path] = (key, claim)
        else:
            await self._drop_claim(path, claim)
        return standing

    async def close(self) -> None:
        """Withdraw every registration, stop every watch, close the channels. Idempotent."""
        leaving = [*self._registrations, *(claim for _, claim in self._claims.values())]
        self._registrations.clear()
        self._claims.clear()
        await asyncio.gather(*(registration.withdraw() for registration in leaving))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(view.close() for view in self._views.values()))
        await self._client.close()

    async def _drop_claim(self, path: str, claim: Registration) -> None:
        self._claims.pop(path, None)
        await claim.withdraw()

    def _key(self, kind: Kind, id: str) -> str:
        return f"{self._root}/{kind}/{id}"

    def _keep(self, key: LeasedKey) -> Registration:
        return Registration(key, self._spawn(key.run(), f"register {key.key.decode()}"))

    def _spawn(self, loop: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        spawner = self._background
        task = asyncio.create_task(loop, name=name) if spawner is None else spawner.spawn(loop, name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("registry loop failed", loop=task.get_name(), exc_info=error)
