"""What the registry says is there, doubted where it must be.

etcd cannot tell a dead process from a lapsed lease, and an emptied etcd tells that everybody is dead. So an entry goes
1. at once when its owner said goodbye (an empty value before the key goes),
2. after `confirm(message)` found that the process itself does not answer, when there is a `confirm`,
3. without one: at once when few go, after `GRACE_S` without re-registration when many go (`is_mass_removal`).
Until then it stays in the view as a *suspect*; a new PUT clears it. A suspect that answers is asked again, less and
less often, until it has registered again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import orjson
import structlog
from google.protobuf import json_format
from google.protobuf.message import Message

from baton.registry.backoff import Backoff
from baton.registry.lease import GOODBYE, LEASE_S

GRACE_S = 3.0 * LEASE_S
"""How long a mass removal that nobody can confirm is held back."""
CONFIRM_S = 3.0
"""How long a process may take to prove that it lives."""
CONFIRMS_AT_ONCE = 16

M = TypeVar("M", bound=Message)
Callback = Callable[[str, M | None], None]
Confirm = Callable[[M], Awaitable[bool]]

_log = structlog.get_logger()


def is_mass_removal(gone: int, before: int) -> bool:
    """Whether `gone` of `before` entries within one lease time is more than a worker dying: all, or two and half."""
    return gone >= before or (gone >= 2 and 2 * gone >= before)


class View(Generic[M]):
    """A mirror of one kind. `items` is always readable, also while etcd is away: then it is the last that was seen.

    `shared` entries (`Registry.claim_card`) are not of one process: the first that claimed it holds the key, and when
    that one leaves another writes it again. So such a key goes in every ordered stop: held back too, but no warning.
    """

    def __init__(
        self, kind: str, message_type: type[M], confirm: Confirm[M] | None = None, *, shared: bool = False
    ) -> None:
        self.kind = kind
        self.invalid = 0
        """Values that were no JSON of the message (ignored)."""
        self._type = message_type
        self._confirm = confirm
        self._shared = shared
        self._items: dict[str, M] = {}
        self._suspects: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._callbacks: list[Callback[M]] = []
        self._synced = asyncio.Event()
        self._gone_at: deque[float] = deque()
        self._confirms = asyncio.Semaphore(CONFIRMS_AT_ONCE)

    def items(self) -> Mapping[str, M]:
        """Every entry by id, suspects included. A live, read-only mapping."""
        return MappingProxyType(self._items)

    def suspects(self) -> frozenset[str]:
        """Ids that the registry has lost and whose process has not been found dead."""
        return frozenset(self._suspects)

    def subscribe(self, callback: Callback[M]) -> Callable[[], None]:
        """Call `callback(id, message)` for each entry now, then for each change; None means removed.

        Returns the way to stop. A callback that raises is logged and does not stop the others.
        """
        self._callbacks.append(callback)
        for id, message in list(self._items.items()):
            self._tell(callback, id, message)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    async def synced(self, timeout: float) -> bool:  # noqa: ASYNC109 - the caller's patience, not a cancellation
        """Wait for the first complete list; False when etcd did not answer in time."""
        try:
            async with asyncio.timeout(timeout):
                await self._synced.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop confirming suspects; the view stays as it is."""
        self._suspects.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def replace(self, values: Mapping[str, bytes]) -> None:
        """A complete list: what it has is set, what it lacks is in doubt."""
        for id, value in values.items():
            self.change(id, value)
        missing = [id for id in self._items if id not in values and id not in self._suspects]
        self._doubt(missing)
        self._synced.set()

    def change(self, id: str, value: bytes | None) -> None:
        """One change: None means that the key is gone."""
        if value is None:
            if id in self._items and id not in self._suspects:
                self._doubt([id])
        elif value == GOODBYE:
            self._remove(id)
        else:
            self._set(id, value)

    def _set(self, id: str, value: bytes) -> None:
        try:
            content = orjson.loads(value)
            if not isinstance(content, dict):
                raise TypeError("not a JSON object")
            message = json_format.ParseDict(content, self._type(), ignore_unknown_fields=True)
        except Exception as error:  # anybody can write there, and a bad value must not end the watch
            self.invalid += 1
            _log.error("registry value ignored", kind=self.kind, id=id, error=repr(error))
            return
        self._absolve(id)
        if self._items.get(id) != message:
            self._items[id] = message
            self._notify(id, message)

    def _remove(self, id: str) -> None:
        self._absolve(id)
        if self._items.pop(id, None) is not None:
            self._notify(id, None)

    def _doubt(self, ids: list[str]) -> None:
        now = time.monotonic()
        while self._gone_at and now - self._gone_at[0] > LEASE_S:
            self._gone_at.popleft()
        present = len(self._items) - len(self._suspects)
        self._gone_at.extend([now] * len(ids))
        recent = len(self._gone_at)
        mass = bool(ids) and is_mass_removal(recent, present + recent - len(ids))
        if mass and self._shared:
            _log.info("held by nobody now: kept until another process holds it", kind=self.kind, ids=ids[:8])
        elif mass:
            _log.warning("mass removal held back", kind=self.kind, gone=recent, ids=ids[:8])
        for id in ids:
            if self._confirm is not None:
                self._suspect(id, self._ask(id, self._confirm))
            elif mass:
                self._suspect(id, self._wait(id))
            else:
                self._remove(id)

    def _suspect(self, id: str, doubt: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(doubt, name=f"suspect {id}")
        self._suspects[id] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, id: str, confirm: Confirm[M]) -> None:
        backoff = Backoff(1.0, 30.0)
        while await self._answers(self._items[id], confirm):
            _log.info("not registered but answering: kept", kind=self.kind, id=id)
            await asyncio.sleep(backoff.next())
        _log.info("removed: not registered and not answering", kind=self.kind, id=id)
        self._remove(id)

    async def _answers(self, message: M, confirm: Confirm[M]) -> bool:
        async with self._confirms:
            try:
                async with asyncio.timeout(CONFIRM_S):
                    return await confirm(message)
            except Exception as error:  # whatever the way it failed: no answer is no life
                _log.info("no answer", kind=self.kind, error=repr(error))
                return False

    async def _wait(self, id: str) -> None:
        await asyncio.sleep(GRACE_S)
        _log.warning("removed: not registered again in time", kind=self.kind, id=id, grace_s=GRACE_S)
        self._remove(id)

    def _absolve(self, id: str) -> None:
        task = self._suspects.pop(id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _notify(self, id: str, message: M | None) -> None:
        for callback in list(self._callbacks):
            self._tell(callback, id, message)

    def _tell(self, callback: Callback[M], id: str, message: M | None) -> None:
        try:
            callback(id, message)
        except Exception:
            _log.exception("registry callback failed", kind=self.kind, id=id)
