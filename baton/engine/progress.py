"""When an engine that has work is stuck: its step is far beyond its prediction.

    stuck = age > max(STALL_S, STALL_FACTOR * predicted)        predicted known
    stuck = age > UNKNOWN_S                                     nothing was learnt yet

The factor is what other processes on the same cores may do to a step; the floor, what they may do to a short one.
Taking a slow engine for a stuck one loses nothing but work, and work is what a loaded machine has not.
"""

from __future__ import annotations

STALL_S = 1.5
STALL_FACTOR = 8.0
UNKNOWN_S = 30.0


def stuck(step_started: float, step_predicted_s: float, now: float) -> bool:
    """Whether a step that began at `step_started` (0: none is due) makes no progress any more. One clock for both."""
    if not step_started:
        return False
    limit = max(STALL_S, STALL_FACTOR * step_predicted_s) if step_predicted_s else UNKNOWN_S
    return now - step_started > limit
