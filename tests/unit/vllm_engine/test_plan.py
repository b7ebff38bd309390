"""What the connector copies, step by step."""

from __future__ import annotations

from baton.engine.vllm.plan import Copy, Planner, StepPlan

SIZE = 32
ROOT = b"r" * 16


def params(
    job: int = 1, slots: tuple[int, ...] = (10, 11, 12), ready: int = 0, saves: bool = True
) -> dict[str, object]:
    return {"baton_job": job, "slots": list(slots), "ready": ready, "saves": saves, "parent": ROOT}


def test_saves_follow_the_chunks() -> None:
    planner = Planner(SIZE)
    assert planner.matched("r", params(), 0, ()) == 0
    planner.allocated("r", [5, 6], 0)
    planner.scheduled("r", 0, [5, 6], anew=True)
    planner.computes("r", 40)
    assert planner.take() == StepPlan(saves=[Copy(1, 0, [10], [5])])
    planner.scheduled("r", 40, [7], anew=False)
    planner.computes("r", 56)
    assert planner.take() == StepPlan(saves=[Copy(1, 1, [11, 12], [6, 7])])
    planner.scheduled("r", 96, [8], anew=False)
    planner.computes("r", 1)
    assert planner.take() == StepPlan()


def test_only_what_vllm_has_not_is_loaded_and_nothing_ready_is_saved() -> None:
    planner = Planner(SIZE)
    given = params(ready=2)
    assert planner.matched("r", given, 0, ()) == 2 * SIZE
    assert planner.matched("r", given, 3 * SIZE, ()) == 0
    assert planner.matched("r", given, SIZE, ()) == SIZE
    planner.allocated("r", [5, 6, 7], SIZE)
    planner.scheduled("r", 2 * SIZE, [5, 6, 7], anew=True)
    planner.computes("r", SIZE)
    assert planner.take() == StepPlan(loads=[Copy(1, 1, [11], [6])], saves=[Copy(1, 2, [12], [7])])


def test_after_a_preemption_the_same_is_loaded_again_and_what_was_saved_is_not() -> None:
    planner = Planner(SIZE)
    given = params(ready=1)
    planner.matched("r", given, 0, ())
    planner.allocated("r", [5, 6, 7], SIZE)
    planner.scheduled("r", SIZE, [5, 6, 7], anew=True)
    planner.computes("r", SIZE)
    planner.take()
    assert planner.matched("r", given, 0, ()) == SIZE
    planner.allocated("r", [20, 21, 22], SIZE)
    planner.scheduled("r", SIZE, [20, 21, 22], anew=True)
    planner.computes("r", 2 * SIZE)
    assert planner.take() == StepPlan(loads=[Copy(1, 0, [10], [20])], saves=[Copy(1, 2, [12], [22])])


def test_the_end_is_told_whatever_was_scheduled_and_takes_a_planned_load_with_it() -> None:
    planner = Planner(SIZE)
    planner.finished("never seen", params(job=7))
    planner.matched("r", params(ready=2), 0, ())
    planner.allocated("r", [5, 6, 7], 2 * SIZE)
    planner.finished("r", params(ready=2))
    assert planner.take() == StepPlan(ended=[7, 1])
    planner.computes("r", 96)
    assert planner.take() == StepPlan()


def test_who_does_not_save_and_who_is_not_ours() -> None:
    planner = Planner(SIZE)
    assert planner.matched("warm-up", None, 0, ()) == 0
    planner.scheduled("warm-up", 0, [1], anew=True)
    planner.computes("warm-up", 64)
    planner.finished("warm-up", None)
    planner.matched("r", params(saves=False), 0, ())
    planner.scheduled("r", 0, [5, 6, 7], anew=True)
    planner.computes("r", 96)
    assert planner.take() == StepPlan()
