"""Whom a frontend takes when no router answers: by what it knows itself, which is newer than the registry."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from baton.v1 import registry_pb2, router_pb2, worker_pb2
from services.frontend.route import own_choice
from services.frontend.session import Session


def chosen(prompt_tokens: int, **workers: Mapping[str, Any]) -> worker_pb2.Plan | None:
    """`workers`: registered fields of merged workers; `now` is the epoch of who answers there."""
    registered, sessions = {}, {}
    for name, fields in workers.items():
        told = {"epoch": 1, "model": "m", "role": registry_pb2.ROLE_MERGED, "max_streams": 8} | dict(fields)
        epoch = told.pop("now", told["epoch"])
        registered[name] = registry_pb2.Worker(id=name, address=f"{name}:1", **told)
        sessions[name] = cast(Session, SimpleNamespace(load=0, connected=True, draining=False, epoch=epoch))
    request = router_pb2.RouteRequest(uid="u", model="m", prompt_tokens=prompt_tokens)
    return own_choice(request, registered, sessions)


def test_the_process_that_answers_and_not_the_one_that_registered() -> None:
    """Restarted in place while etcd was away: under the old epoch it would refuse the plan."""
    plan = chosen(10, a={"now": 2})
    assert plan is not None
    assert plan.worker.epoch == 2


def test_nobody_whose_context_is_too_short() -> None:
    for _ in range(8):
        plan = chosen(100, a={"max_context": 100}, b={"max_context": 101})
        assert plan is not None
        assert plan.worker.id == "b"
    assert chosen(101, b={"max_context": 101}) is None
    assert chosen(101, c={"max_context": 0}) is not None, "one that does not tell"
