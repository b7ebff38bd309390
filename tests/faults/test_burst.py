"""A burst on idle prefills: each gets its share, although none of them has said yet that it is busy."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fleet import prompt
from tests.integration.asking import Answer, plain_client
from tests.integration.stack import SERVED, Stack

pytestmark = pytest.mark.integration

BURST = 256
PREFILLS = 4
SLACK = 20


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
    """256 requests at once on 4 idle prefills: about 64 each, by plan and by what happened."""
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
    assert planned.total() == BURST
    assert len(planned) == PREFILLS
    assert all(abs(count - BURST // PREFILLS) <= SLACK for count in planned.values()), planned
    done = {name: wide.metric(name, "baton_worker_prefill_runs_total") for name in wide.workers("prefill")}
    print(f"ran {done}")
    await asyncio.to_thread(wide.settle)
