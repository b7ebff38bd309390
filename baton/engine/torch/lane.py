"""What the batch lane may do in a step: nothing that the other requests of it would feel.

- Beside others, batch work may lengthen the step by `BESIDE` of what it should take without: streams first, then prompt
  tokens. What a stream costs is learnt (`StepCost`); until it is known, none run beside others.
- Alone, its streams and its chunks of prompts may each take `ALONE_S` of a step: whoever arrives waits little for his.
- A `1 / POOL_SHARE` of the pool stays to be had for others.
"""

from __future__ import annotations

from dataclasses import dataclass

BESIDE = 0.05
ALONE_S = 0.03
LEAST_CHUNK = 16
"""Prompt tokens: with fewer, a step's fixed part is nearly all of it."""
LEAST_STREAMS = 8
"""Alone: a cost that was learnt on a bad day would else never be learnt anew."""
POOL_SHARE = 4


@dataclass(frozen=True)
class Costs:
    """What steps cost, as learnt; 0 is not known yet."""

    stream_s: float
    """One more stream in a step."""
    prefill_tok_s: float


@dataclass(frozen=True)
class Allowed:
    """What of the batch lane a step may hold."""

    streams: int
    prompt_tokens: int


def allowed(step_s: float, room: int, chunk_tokens: int, costs: Costs) -> Allowed:
    """For a step that takes `step_s` for others (0: there are none of them in it), with `room` for streams."""
    if step_s <= 0:
        streams = max(LEAST_STREAMS, int(ALONE_S / costs.stream_s)) if costs.stream_s > 0 else room
        tokens = max(LEAST_CHUNK, int(ALONE_S * costs.prefill_tok_s))
        return Allowed(min(room, streams), min(chunk_tokens, tokens))
    slack = BESIDE * step_s
    streams = min(room, int(slack / costs.stream_s)) if costs.stream_s > 0 else 0
    tokens = min(chunk_tokens, int((slack - streams * costs.stream_s) * costs.prefill_tok_s))
    return Allowed(streams, tokens if tokens >= LEAST_CHUNK else 0)


def kept(pool_blocks: int) -> int:
    """Blocks that the batch lane leaves to others."""
    return pool_blocks // POOL_SHARE
