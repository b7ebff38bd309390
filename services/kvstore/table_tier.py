"""What tiers have in common whose blocks lie in the slots of a `SlotTable`, on a medium asked through `MediumIo`: what
is here, as the table says; a block's way in and out, with the counts and the misses of whatever goes wrong."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping

import structlog

from services.kvstore.eviction import Watermarks
from services.kvstore.medium_io import MediumIo, MediumUnavailable
from services.kvstore.table import Room, SlotEntry, SlotTable
from services.kvstore.tier import Facts, Placed, Tier, Verdict, verdict

_log = structlog.get_logger()


class TableTier(Tier):
    """A tier over `_table`, which a new layout replaces. `count(operation, outcome, number)` hears of every operation's
    end. In a slot `head` bytes lie before the payload."""

    head = 0

    def __init__(
        self,
        io: MediumIo,
        watermarks: Watermarks,
        quotas: Mapping[str, int] | None,
        count: Callable[[str, str, int], None],
    ) -> None:
        super().__init__()
        self._io = io
        self._watermarks = watermarks
        self._quotas = dict(quotas or {})
        self._count = count
        self._table = self._new_table(0, 1)
        self._loading = 0

    def holds(self, key: bytes) -> bool:
        return key in self._table.index

    def keys(self) -> list[bytes]:
        return list(self._table.index)

    def placed(self, key: bytes) -> Placed | None:
        entry = self._table.index.get(key)
        return Placed(entry.facts, entry.readers, time.monotonic() - entry.used) if entry else None

    async def load(self, key: bytes, into: memoryview) -> bool:
        return await self._load(key, into) == "ok"

    async def verify(self, key: bytes) -> Verdict:
        if (shape := self.shape) is None:
            return Verdict.SOUND
        return verdict(await self._load(key, memoryview(bytearray(shape.block_bytes))))

    def check_integrity(self) -> list[str]:
        found = [f"{self.name}: {finding}" for finding in self._table.check()]
        if self._io.late:
            found.append(f"{self.name}: {self._io.late} operations have not returned")
        if self._table.busy:
            found.append(f"{self.name}: {self._table.busy} slots are being read or written")
        return found

    @abc.abstractmethod
    def _new_table(self, slots: int, size: int) -> SlotTable:
        """For so many slots of `size` bytes."""

    @abc.abstractmethod
    async def _load(self, key: bytes, into: memoryview) -> str:
        """`_read_slot` of the block's; "missing" without it."""

    async def _write_slot(
        self,
        size: int,
        room: Room,
        key: bytes,
        payload: memoryview,
        facts: Facts,
        write: Callable[[memoryview], int],
        valid: Callable[[], bool] = lambda: True,
    ) -> str:
        """Have a thread `write` a slot of `size` bytes from a buffer with the payload, and seal it under the sum that
        `write` returns: "ok", or "cleared" when the block was cleared meanwhile or its slot is not `valid` any more.
        Raises MediumUnavailable. `room` ends in any case, a late write's when it has returned."""
        table, sealed = self._table, False

        def fill(buffer: memoryview) -> None:
            buffer[self.head : self.head + len(payload)] = payload

        def seal(buffer: memoryview, digest: int) -> None:
            nonlocal sealed
            if not room.cleared and valid():
                sealed = True
                table.seal(room, key, facts, digest)

        def free() -> None:
            if not sealed:
                table.cancel(room)

        await self._io.run(size, write, before=fill, after=seal, ended=free)
        return "ok" if sealed else "cleared"

    async def _read_slot(
        self, size: int, entry: SlotEntry, into: memoryview, read: Callable[[memoryview], bool]
    ) -> str:
        """Have a thread `read` a slot of `size` bytes and say whether it is the block, held by `table.read`; then copy
        the payload out. The outcome, counted; a block that is not what it was is dropped."""
        table, key, alone = self._table, entry.key, not self._loading

        def timed(buffer: memoryview) -> float | None:
            began = time.monotonic()
            good = read(buffer)
            return time.monotonic() - began if good else None

        def copy(buffer: memoryview, seconds: float | None) -> None:
            if seconds is not None:
                into[:] = buffer[self.head : self.head + len(into)]

        self._loading += 1
        try:
            seconds = await self._io.run(size, timed, after=copy, ended=lambda: table.done(entry))
            outcome = "corrupt" if seconds is None else "ok"
        except MediumUnavailable as error:
            seconds, outcome = None, self._failed("load", error)
        finally:
            self._loading -= 1
        if outcome == "corrupt" and table.index.get(key) is entry:
            table.drop(key)
            self.on_gone([key], "corrupt")
        if alone and seconds is not None:
            self.speed.alone(len(into), seconds)
        self._count("load", outcome, 1)
        return outcome

    def _failed(self, operation: str, error: MediumUnavailable) -> str:
        if error.outcome != "open":
            _log.warning("tier", tier=self.name, operation=operation, outcome=error.outcome, error=str(error))
        return error.outcome
