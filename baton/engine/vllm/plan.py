"""What the connector copies in a step, decided where vLLM schedules. Pure bookkeeping: no torch, no vLLM.

A request of ours carries a *job* in its `kv_transfer_params`: the staging slots of its prompt's whole blocks, and how
many of the first of them hold verified KV. All of it is known before vLLM sees the request and none of it changes, so
every answer here can be given again, after a preemption for example.

    loads   staging -> vLLM   blocks that are ready in staging and that vLLM has not in its own prefix cache
    saves   vLLM -> staging   blocks that this step completes
    ended   jobs of finished and aborted requests: when every rank has passed this step, their slots are ours again

What comes after the prompt's slots, its tail and the output, is saved block by block into *spare* slots, of which a job
gets the next one when the last is full. Such a block is named here, over tokens that vLLM has accepted: those never
change, while a step computes KV of tokens that it has not told yet (asynchronous scheduling). So a block is saved when
both are there: its KV with this step at the latest, and its last token before. Without a spare it waits in vLLM, where
a running request's blocks stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.kv.keys import chain

JOB, SLOTS, READY, SAVES, PARENT = "baton_job", "slots", "ready", "saves", "parent"
"""Keys of `kv_transfer_params`."""


@dataclass
class Copy:
    """Blocks of one job: `slots[i]` of staging and vLLM's block `blocks[i]`, prompt block `first` + i. Of output, one
    block, and `key` names it."""

    job: int
    first: int
    slots: list[int]
    blocks: list[int]
    key: bytes = b""


@dataclass
class StepPlan:
    """One step's copies, loads before the model runs and saves after."""

    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


@dataclass
class _Tracked:
    job: int
    slots: list[int]
    ready: int
    saved: int
    """The prompt's blocks that need no saving (any more)."""
    tokens: Sequence[int]
    """vLLM's own list: the prompt and the output that it has accepted."""
    output: int
    """The next block behind the prompt's slots to be saved."""
    parent: bytes
    """The key of the block before that one."""
    spare: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Planner:
    """Follows vLLM's requests by its own ids."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._tracked: dict[str, _Tracked] = {}
        self._by_job: dict[int, _Tracked] = {}
        self._plan = StepPlan()

    def matched(self, request_id: str, params: Mapping[str, Any] | None, computed: int, tokens: Sequence[int]) -> int:
        """Prompt tokens beyond vLLM's own `computed` (whole blocks) that staging can give. Changes no answer.

        `tokens` are the request's: a list that grows as vLLM accepts output.
        """
        if not params or JOB not in params:
            return 0
        if request_id not in self._tracked:
            slots, ready = list(params[SLOTS]), int(params[READY])
            saved = ready if params[SAVES] else len(slots)
            tracked = _Tracked(params[JOB], slots, ready, saved, tokens, len(slots), params[PARENT])
            self._tracked[request_id] = self._by_job[tracked.job] = tracked
        return max(0, self._tracked[request_id].ready * self._size - computed)

    def allocated(self, request_id: str, blocks: Sequence[int], external: int) -> None:
        """vLLM gave the request `blocks` and counts on `external` tokens from us: those before are its own hits, maybe
        shared, and never written."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not external:
            return
        first, end = tracked.ready - external // self._size, tracked.ready
        self._plan.loads.append(Copy(tracked.job, first, tracked.slots[first:end], list(blocks[first:end])))

    def scheduled(self, request_id: str, computed: int, blocks: Sequence[int], *, anew: bool) -> None:
        """In this step the request has `computed` tokens and got `blocks`: all of them when `anew`, else more."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        tracked.computed = computed
        if anew:
            tracked.blocks = list(blocks)
        else:
            tracked.blocks.extend(blocks)

    def spare(self, job: int, slot: int) -> None:
        """The job's next block of output goes to `slot`. Ignored for a job that has finished: its end is being told."""
        if job in self._by_job:
            self._by_job[job].spare = slot

    def computes(self, request_id: str, tokens: int) -> None:
        """This step adds `tokens`: what it completes is saved."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        full = (tracked.computed + tokens) // self._size
        prompt = min(full, len(tracked.slots))
        if prompt > tracked.saved:
            first, tracked.saved = tracked.saved, prompt
            copy = Copy(tracked.job, first, tracked.slots[first:prompt], tracked.blocks[first:prompt])
            self._plan.saves.append(copy)
        if tracked.spare is not None and tracked.output < min(full, len(tracked.tokens) // self._size):
            self._save_output(tracked, tracked.spare)

    def _save_output(self, tracked: _Tracked, slot: int) -> None:
        number, size = tracked.output, self._size
        key = chain(tracked.parent, list(tracked.tokens[number * size : (number + 1) * size]))
        self._plan.saves.append(Copy(tracked.job, number, [slot], [tracked.blocks[number]], key))
        tracked.output, tracked.parent, tracked.spare = number + 1, key, None

    def finished(self, request_id: str, params: Mapping[str, Any] | None) -> None:
        """vLLM has let go of the request, whether it was ever scheduled or not."""
        self._tracked.pop(request_id, None)
        if params and JOB in params:
            job = int(params[JOB])
            self._by_job.pop(job, None)
            # Its load was planned, but it will not run: nobody may write blocks that are no longer its own.
            self._plan.loads = [copy for copy in self._plan.loads if copy.job != job]
            self._plan.ended.append(job)

    def take(self) -> StepPlan:
        """What was planned since the last call."""
        plan, self._plan = self._plan, StepPlan()
        return plan
