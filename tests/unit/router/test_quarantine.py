"""Quarantine: out at once, asked again with growing jittered pauses, remembered for a while."""

from __future__ import annotations

import random

from services.router.quarantine import Quarantine


def test_pauses_grow_are_jittered_and_bounded() -> None:
    quarantine = Quarantine(first_s=0.25, most_s=10.0, random_=random.Random(1))
    now, pauses = 0.0, []
    for _ in range(12):
        due = quarantine.failed("w", "refused", now)
        assert quarantine.due("w") == due
        pauses.append(due - now)
        now = due
    for number, pause in enumerate(pauses):
        full = min(10.0, 0.25 * 2**number)
        assert 0.5 * full - 1e-9 <= pause <= full + 1e-9
    assert len({round(p / min(10.0, 0.25 * 2**n), 6) for n, p in enumerate(pauses)}) > 6


def test_in_and_out() -> None:
    quarantine = Quarantine()
    assert quarantine.why("w") == ""
    quarantine.failed("w", "refused", 0.0)
    assert quarantine.why("w") == "refused"
    quarantine.answered("w")
    assert quarantine.why("w") == ""
    assert quarantine.due("w") == 0.0
    quarantine.answered("never seen")


def test_flapping_waits_longer_until_calm() -> None:
    quarantine = Quarantine(first_s=1.0, most_s=60.0, calm_s=30.0, random_=random.Random(1))
    quarantine.failed("w", "x", 0.0)
    quarantine.answered("w")
    assert quarantine.failed("w", "x", 5.0) - 5.0 >= 1.0
    quarantine.answered("w")
    assert quarantine.failed("w", "x", 50.0) - 50.0 <= 1.0


def test_forgotten_starts_over() -> None:
    quarantine = Quarantine(first_s=1.0)
    for _ in range(5):
        quarantine.failed("w", "x", 0.0)
    quarantine.forget("w")
    assert quarantine.why("w") == ""
    assert quarantine.failed("w", "x", 0.0) <= 1.0
