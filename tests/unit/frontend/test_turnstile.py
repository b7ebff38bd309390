"""Requests that come at once start a few in each turn of the loop, in order; probes do not wait."""

from __future__ import annotations

import asyncio
from typing import Any

from services.frontend.turnstile import PER_TURN, Turnstile

COUNT = 20 * PER_TURN + 3


class Started:
    """An app that notes who was started in which turn of the loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.order: list[tuple[int, str]] = []
        self.turnstile = Turnstile(self)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.order.append((self.turn, scope["path"]))

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    def ask(self, path: str, method: str = "POST") -> asyncio.Task[None]:
        scope: Any = {"type": "http", "method": method, "path": path}
        return asyncio.create_task(self.turnstile(scope, None, None))  # type: ignore[arg-type]


async def test_a_few_a_turn_in_order_and_probes_pass() -> None:
    app = Started()
    turns = asyncio.create_task(app.count_turns())
    for _ in range(2):  # and again, when all is quiet
        app.order.clear()
        tasks = [app.ask(str(i)) for i in range(COUNT)]
        tasks.append(app.ask("probe", "GET"))
        tasks[PER_TURN + 2].cancel()
        await asyncio.sleep(0)
        tasks[PER_TURN + 5].cancel()  # it waits
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)
        posts = [path for _, path in app.order if path != "probe"]
        gone = {str(PER_TURN + 2), str(PER_TURN + 5)}
        assert posts == [str(i) for i in range(COUNT) if str(i) not in gone]
        first = app.order[0][0]
        assert next(turn for turn, path in app.order if path == "probe") <= first + 1
        for turn in {turn for turn, _ in app.order}:
            started = [path for at, path in app.order if at == turn and path != "probe"]
            assert len(started) <= 2 * PER_TURN, "a turn of ours may see the end of one of the loop's and the next"
    turns.cancel()
