"""Workers that share a device, a core say, slow each other: each is told what the others there have to do.

A worker that computes on what nobody else does is left as it is. Of one with neighbours: its prompts slow their streams
(and freeze its own), their queued prompts share its time, and while they compute prompts these and its streams slow
each other.

Cores of one host share its memory, and a core that rests runs what is around the engines: workers, frontends, clients.
A core that streams slows the others therefore, and hardly more with six streams than with one: it is the first stream
there that costs theirs something. Which term each comes into: README.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.router.costs import PREFILL, WorkerState

ASSUMED_SHARE = 0.5
"""Of its time a prefill worker is taken to compute prompts, at least: it is there because they come, and a stream that
is put beside it after a rest, when none did lately, stays when they do."""
WAKING = 0.25
"""By how much longer a step takes when all cores of a host stream than when one does (README.md: measured on two). Of
more than two, each is taken to add the same."""
CROWDED = 1.6
"""A step so many times as long as that of half the streams: then two cores are better for all of them, woken or not."""


def neighbourhood(device: str) -> str:
    """A core's is its host, any other device is one of its own. Workers of different neighbourhoods do not slow each
    other."""
    host, _, name = device.rpartition("/")
    return f"{host}/cpu" if name.startswith("cpu:") else device


def with_neighbours(states: Sequence[WorkerState]) -> Sequence[WorkerState]:
    """The same workers, those with neighbours told of these."""
    if not any(state.device for state in states):
        return states
    groups: defaultdict[str, list[WorkerState]] = defaultdict(list)
    for state in states:
        if state.device:
            groups[state.device].append(state)
    told = [_told(state, groups[state.device]) if state.device else state for state in states]
    around: defaultdict[str, list[str]] = defaultdict(list)
    for device in groups:
        around[neighbourhood(device)].append(device)
    if all(len(devices) == 1 for devices in around.values()):
        return told
    waking_s = {device: _waking_s(device, around[neighbourhood(device)], groups) for device in groups}
    return [replace(state, waking_s=waking) if (waking := waking_s.get(state.device, 0.0)) else state for state in told]


def _waking_s(device: str, around: Sequence[str], groups: Mapping[str, Sequence[WorkerState]]) -> float:
    """What the first stream on `device` costs those on the others `around` it, for each token of its own; 0 when it is
    not the first, or when they are too many for the core that they are on. One step there goes with each token here:
    steps are about as long."""
    if len(around) == 1 or any(state.streams for state in groups[device]):
        return 0.0
    others = [state for other in around if other != device for state in groups[other] if state.streams]
    if any(_step_s(state, 1.0) > CROWDED * _step_s(state, 0.5) for state in others):
        return 0.0
    return WAKING / (len(around) - 1) * sum(state.streams * _step_s(state, 1.0) for state in others)


def _step_s(state: WorkerState, share: float) -> float:
    """A step of such a share of its streams."""
    return state.step_s + state.stream_s * (share * state.streams - 1.0)


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
