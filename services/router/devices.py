"""Workers that share a device, a core say, slow each other: each is told what the others there have to do.

A worker that computes on what nobody else does is left as it is. Of one with neighbours: its prompts slow their streams
(and freeze its own), their queued prompts share its time, and while they compute prompts these and its streams slow
each other. Which term each comes into: README.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from services.router.costs import PREFILL, WorkerState

ASSUMED_SHARE = 0.5
"""Of its time a prefill worker is taken to compute prompts, at least: it is there because they come, and a stream that
is put beside it after a rest, when none did lately, stays when they do."""


def with_neighbours(states: Sequence[WorkerState]) -> Sequence[WorkerState]:
    """The same workers, those that share a device with others of them told of these."""
    if not any(state.device for state in states):
        return states
    groups: defaultdict[str, list[WorkerState]] = defaultdict(list)
    for state in states:
        if state.device:
            groups[state.device].append(state)
    return [_told(state, groups[state.device]) if state.device else state for state in states]


def _told(state: WorkerState, group: Sequence[WorkerState]) -> WorkerState:
    others = [other for other in group if other is not state]
    if not others:
        return state
    return replace(
        state,
        beside_streams=sum(other.streams for other in others),
        beside_queue_s=sum(other.queued_tokens / other.prefill_tok_s for other in others),
        beside_share=min(1.0, sum(_share(other) for other in others)),
    )


def _share(other: WorkerState) -> float:
    return max(other.prefill_share, ASSUMED_SHARE) if other.role is PREFILL else other.prefill_share
