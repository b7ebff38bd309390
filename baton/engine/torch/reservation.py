"""One request's room in the engine process's pool, as the worker process holds it."""

from __future__ import annotations

from baton.engine.late import LateReads
from baton.engine.loading import LoadingReservation
from baton.engine.port import EngineSpec, Request
from baton.engine.torch import messages as m
from baton.engine.torch.link import CALL_S, Link


class TorchReservation(LoadingReservation):
    """The slots are in the child's pool: it is told what became of them. `names` have the partial tail among them."""

    def __init__(
        self,
        link: Link,
        spec: EngineSpec,
        late: LateReads,
        job: int,
        request: Request,
        names: list[bytes],
        slots: list[int],
        hit_tokens: int,
    ) -> None:
        super().__init__(spec, late, request, names, slots, hit_tokens)
        self.job = job
        self._link = link

    def _commit(self, tokens: int) -> None:
        self._link.tell(m.Commit(self.job, tokens))

    def _abandoned(self, blocks: list[int]) -> None:
        self._link.tell(m.Swap(self.job, self._link.number(), blocks))

    async def _exchange(self, blocks: list[int]) -> list[int]:
        call = self._link.number()
        answer = await self._link.ask(call, m.Swap(self.job, call, blocks), CALL_S)
        assert isinstance(answer, m.Swapped)
        return answer.slots

    def _give_back(self) -> None:
        self._link.tell(m.Release(self.job))
