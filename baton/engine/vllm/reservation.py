"""One request's room in the staging pool."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.late import LateReads
from baton.engine.loading import LoadingReservation
from baton.engine.port import EngineSpec, Request
from baton.engine.vllm.staging import Room, Staging


class VllmReservation(LoadingReservation):
    """Whole blocks only: what of the prompt fills none is computed where the request runs. `stop` ends what runs."""

    def __init__(
        self,
        spec: EngineSpec,
        late: LateReads,
        staging: Staging,
        room: Room,
        request: Request,
        stop: Callable[[VllmReservation], None],
    ) -> None:
        super().__init__(spec, late, request, room.keys, room.slots, room.ready * spec.block_size)
        self.room = room
        self.prompt = [*request.prompt_ids, *request.emitted_ids]
        self._staging = staging
        self._stop = stop

    def _commit(self, tokens: int) -> None:
        self._staging.seal(self.room, tokens // self._spec.block_size)

    def _abandoned(self, blocks: list[int]) -> None:
        self._staging.swap(self.room, blocks)

    async def _exchange(self, blocks: list[int]) -> list[int]:
        self._staging.swap(self.room, blocks)
        return self.room.slots

    def _give_back(self) -> None:
        self._stop(self)
        self._staging.release(self.room)
