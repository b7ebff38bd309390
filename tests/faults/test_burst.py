"""A burst on idle prefills: each gets its share, although none of them has said yet that it is busy."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton.v1 import registry_pb2, router_pb2, router_pb2_grpc, worker_pb2
from tests.faults.fleet import prompt
from tests.integration.asking import Answer, plain_client
from tests.integration.stack import HANG_S, SERVED, Stack

pytestmark = pytest.mark.integration

BURST = 256
PREFILLS = 4
SLACK = 20
FAIR = 10
"""What one does at least that is slower than the others at that moment. Speeds are measured: on a machine that is busy
with other things, those of equal workers came to 1 to 5."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Stack]:
    """Four prefills, one decode that has room for all, one router, and a frontend that only hands over."""
    run = Stack(
        tmp_path_factory.mktemp("burst"),
        tiny,
        prefill=PREFILLS,
        merged=0,
        kvstore=False,
        frontends={"strict": "strict"},
        pool_gib=0.06,
        max_streams=BURST,
    ).start()
    yield run
    run.teardown()


async def test_burst_is_spread(wide: Stack) -> None:
    """256 requests at once on 4 idle prefills: all are answered, and each prefill did a fair part of the work."""
    async with plain_client() as client:

        async def one(i: int) -> Answer:
            asked = {"model": SERVED, "prompt": prompt(200, "burst", i), "max_tokens": 2, "ignore_eos": True}
            reply = await client.post(f"{wide.url('strict')}/v1/completions", json=asked)
            whole = reply.json()
            return Answer(
                reply.status_code,
                reply.headers.get("x-baton-route", ""),
                story=whole.get("baton", {}),
                error=whole.get("error", {}),
            )

        answers = await asyncio.gather(*(one(i) for i in range(BURST)))
    assert Counter(a.status for a in answers) == {200: BURST}, [a.error for a in answers if a.status != 200][:3]
    planned = Counter(re.findall(r"prefill=([^;]+)", " ".join(a.route + ";" for a in answers)))
    print(f"planned {dict(planned)}")
    done = {name: wide.metric(name, "baton_worker_prefill_runs_total") for name in wide.workers("prefill")}
    print(f"ran {done}")
    assert planned.total() == sum(done.values()) == BURST
    assert min(done.values()) >= FAIR, done
    await asyncio.to_thread(wide.settle)


async def test_routes_at_once_are_spread(wide: Stack) -> None:
    """256 routes before any worker could report: each prefill gets its part by its speed, 64 where all are equal."""
    async with grpc.aio.insecure_channel(wide.processes["router"].address) as channel:
        router = router_pb2_grpc.RouterServiceStub(channel)
        view = await router.View(router_pb2.ViewRequest(), timeout=HANG_S)
        speed = {w.worker.id: w.load.prefill_tok_s for w in view.workers if w.worker.role == registry_pb2.ROLE_PREFILL}
        asked = [
            router_pb2.RouteRequest(
                uid=f"burst-{i}",
                model=SERVED,
                prompt_tokens=200,
                max_tokens=2,
                deadline=time.time() + HANG_S,
                fallback=worker_pb2.FALLBACK_STRICT,
            )
            for i in range(BURST)
        ]
        replies = await asyncio.gather(*(router.Route(request, timeout=HANG_S) for request in asked))
    assert not any(reply.HasField("failure") for reply in replies), replies[0]
    planned = Counter(reply.plan.prefill.id for reply in replies)
    share = {id: BURST * tok_s / sum(speed.values()) for id, tok_s in speed.items()}
    print(f"planned {dict(planned)}, by speed { ({id: round(n) for id, n in share.items()}) }")
    assert all(abs(planned[id] - share[id]) <= SLACK for id in share), (planned, share)
    await asyncio.to_thread(wide.settle)
