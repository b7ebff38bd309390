"""How KV comes into a request's room, whichever engine's pool it is in.

A peer's handles are screened against the prompt, READ into reserved slots, verified by the transport, and the verified
prefix is committed. A slot that a late read may still write to is exchanged for another one and quarantined, and so is
every slot of a read whose caller has gone. What an engine adds is where its slots are kept: four methods.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from dataclasses import replace

from baton.engine.late import LateReads
from baton.engine.port import EngineSpec, Reader, Request, Reservation
from baton.errors import BatonError, Reason
from baton.kv.handle import Handle
from baton.transfer.port import BlockRead, ReadReport


class LoadingReservation(Reservation):
    """Slots of one request. `names` are the keys of the prompt's blocks, partial tail included where the engine takes
    one, and `slots` the places of the first of them."""

    def __init__(
        self, spec: EngineSpec, late: LateReads, request: Request, names: list[bytes], slots: list[int], hit_tokens: int
    ) -> None:
        self.request = request
        self.prompt_tokens = len(request.prompt_ids) + len(request.emitted_ids)
        self.cached_tokens = hit_tokens
        self.hit_tokens = hit_tokens
        self._spec = spec
        self._late = late
        self._names = names
        self._slots = slots
        self._reading: tuple[asyncio.Task[ReadReport], list[int]] | None = None
        """The read under way, and the prompt blocks that it writes."""
        self._moved = False
        """A read was abandoned: the engine has given its blocks other slots since."""
        self._released = False

    @abc.abstractmethod
    def _commit(self, tokens: int) -> None:
        """The first `tokens` prompt tokens have their KV in place, verified."""

    @abc.abstractmethod
    def _abandoned(self, blocks: list[int]) -> None:
        """A read that nobody waits for may still write to these prompt blocks: quarantine their slots, take others."""

    @abc.abstractmethod
    async def _exchange(self, blocks: list[int]) -> list[int]:
        """Quarantine these blocks' slots and take others (fewer when there are none): every slot in prompt order."""

    @abc.abstractmethod
    def _give_back(self) -> None:
        """Everything goes back to the engine. Called once."""

    async def load(self, first_block: int, handles: Sequence[Handle], reader: Reader, deadline: float) -> ReadReport:
        if self._released or self._reading is not None:
            raise BatonError(Reason.ABORTED, "the reservation is released, or another load is under way")
        if self._moved:
            await self._swap([])
        size = self._spec.block_size
        have = -(-self.cached_tokens // size)
        gap = first_block > have  # nothing after it can be used
        reasons = [
            Reason.KV_BAD_HANDLE if gap else self._refusal(number, handle, have)
            for number, handle in enumerate(handles, start=first_block)
        ]
        bad = next((i for i, reason in enumerate(reasons) if reason is not None), len(handles))
        skipped = min(max(0, have - first_block), bad)
        blocks = [BlockRead(handle, 0, None) for handle in handles[:skipped]]
        report = ReadReport((), 0, 0.0)
        if skipped < bad:
            report = await self._read(
                list(range(first_block + skipped, first_block + bad)), handles[skipped:bad], reader, deadline
            )
            good = report.verified_prefix()
            if good:
                self.cached_tokens = (first_block + skipped + good - 1) * size + handles[skipped + good - 1].tokens
                self._commit(self.cached_tokens)
            await self._swap_late(report)
        refused = [BlockRead(handle, 0, reasons[bad]) for handle in handles[bad:]]
        return replace(report, blocks=[*blocks, *report.blocks, *refused])

    def _refusal(self, number: int, handle: Handle, have: int) -> Reason | None:
        """Why a handle cannot be read into prompt block `number`, when `have` blocks are in place."""
        spec = self._spec
        if number < have:
            return None
        if handle.fingerprint != spec.layout.digest():
            return Reason.KV_LAYOUT_MISMATCH
        tokens = min(spec.block_size, self.prompt_tokens - number * spec.block_size)
        good = number < len(self._names) and (handle.key, handle.tokens) == (self._names[number], tokens)
        if not good or handle.length != spec.layout.block_bytes:
            return Reason.KV_BAD_HANDLE
        if number >= len(self._slots):
            return Reason.NO_CAPACITY  # its slot went to quarantine and there was no other
        return None

    def _offset(self, number: int) -> int:
        return self._slots[number] * self._spec.layout.block_bytes

    async def _read(self, numbers: list[int], handles: Sequence[Handle], reader: Reader, deadline: float) -> ReadReport:
        """The read itself. When the caller is cancelled, its slots leave the reservation until the read is over."""
        offsets = [self._offset(number) for number in numbers]
        task = asyncio.create_task(reader.read(handles, offsets, deadline), name="kv read")
        self._reading = task, numbers
        try:
            report = await asyncio.shield(task)
        except BaseException:
            self._abandon()
            raise
        if self._reading is None:
            raise BatonError(Reason.ABORTED, "the reservation was released while its KV was being read")
        self._reading = None
        return report

    def _abandon(self) -> None:
        """Nobody waits for the read under way any more, but it may write yet: its slots wait for it in quarantine."""
        if self._reading is None:
            return
        task, numbers = self._reading
        self._reading = None
        self._moved = True
        slots = [self._slots[number] for number in numbers]
        self._abandoned(numbers)
        self._late.abandon(task, slots)

    async def _swap_late(self, report: ReadReport) -> None:
        """Late slots are exchanged for new ones and quarantined until the read has settled."""
        if not report.late or report.settled is None:
            return
        late = [offset // self._spec.layout.block_bytes for offset in report.late]
        self._late.wait(report.settled, late)
        await self._swap([self._slots.index(slot) for slot in late])

    async def _swap(self, blocks: list[int]) -> None:
        self._moved = True  # until the answer is here: a cancelled caller leaves us without it
        self._slots = await self._exchange(blocks)
        self._moved = False

    def end(self) -> None:
        """Give everything back. Idempotent."""
        if self._released:
            return
        self._released = True
        self._abandon()
        self._give_back()

    async def release(self) -> None:
        self.end()
