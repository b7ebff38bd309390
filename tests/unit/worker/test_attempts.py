"""Engine events on their way to sessions."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from baton.engine.port import Request, SamplingParams, TokenEvent
from baton.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempt, Attempts
from baton.worker.metrics import WorkerMetrics
from baton.worker.sessions import Session


def attempt(uid: str, session: Session, metrics: WorkerMetrics) -> Attempt:
    request = Request(uid, 1, [1, 2], SamplingParams(max_tokens=4, seed=1), b"root", time.time() + 60)
    return Attempt(request, session, pb.Plan(mode=pb.MODE_MERGED), False, "merged-1", metrics)


async def test_an_event_that_cannot_be_ends_its_own_attempt_only() -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    session, attempts = Session("s", "frontend"), Attempts(metrics)
    broken, sound = attempt("broken", session, metrics), attempt("sound", session, metrics)
    attempts.add(broken)
    attempts.add(sound)
    attempts.dispatch(
        [
            TokenEvent("broken", 1, 0, 0, text="x", text_tokens=2**40),
            TokenEvent("sound", 1, 0, 0, token_ids=(7,)),
        ]
    )
    events, _ = await session.take()
    assert {(e.uid, e.failure.reason, tuple(e.tokens.ids)) for e in events} == {
        ("broken", "ENGINE_FAILED", ()),
        ("sound", "", (7,)),
    }
