"""Runs responses in the background: the same calls, whose events go to a log instead of a client."""

from __future__ import annotations

import asyncio
import contextlib
import time

import structlog

from baton.errors import BatonError, Reason
from services.frontend.call import Call
from services.frontend.errors import internal
from services.frontend.frontend import Frontend
from services.frontend.respond import count_call
from services.frontend.responses.format import Keep, ResponseFormat
from services.frontend.responses.run import Run

MAX_RUNS = 64
"""Responses in the background at once: nobody waits for them, so nobody would stop asking."""
ENDPOINT = "responses_background"

_log = structlog.get_logger()


class Runs:
    """The runs under way. Each is one of the requests that the gate has let in."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._running = 0

    def check(self) -> None:
        """Raises BatonError(NO_CAPACITY) when there are as many as there may be."""
        if self._running >= MAX_RUNS:
            self._frontend.metrics.refused.labels("background").inc()
            raise BatonError(Reason.NO_CAPACITY, f"{self._running} responses run in the background; try again soon.")

    def start(self, run: Run, call: Call, format: ResponseFormat, keep: Keep, held: contextlib.ExitStack) -> None:
        """Start one. When it has ended, `keep` is called with how, and `held` is closed."""
        self._running += 1
        run.log.add(b"".join(format.begin("queued")))
        run.task = self._frontend.backend.background.spawn(
            self._run(run, call, format, keep, held), f"response {format.id}"
        )

    async def _run(self, run: Run, call: Call, format: ResponseFormat, keep: Keep, held: contextlib.ExitStack) -> None:
        metrics, begun = self._frontend.metrics, time.monotonic()
        failure: BatonError | None = None
        outcome = "cancelled"
        metrics.active.inc()
        try:
            async with self._frontend.requests.limited():
                await self._generate(run, call, format)
            outcome = "ok"
        except BatonError as error:
            failure = error
        except asyncio.CancelledError:
            call.close(Reason.ABORTED)
            raise
        except Exception:
            _log.exception("response failed", id=format.id)
            failure = internal()
        finally:
            if failure is not None:
                outcome = failure.reason.name.lower()
                run.log.add(format.failed(failure))
            run.log.end()
            keep(format.final or format.stopped("cancelled"))
            call.close(failure.reason if failure is not None else None)
            count_call(call, metrics)
            metrics.requests.labels(ENDPOINT, outcome).inc()
            metrics.active.dec()
            metrics.duration.observe(time.monotonic() - begun)
            self._running -= 1
            held.close()

    async def _generate(self, run: Run, call: Call, format: ResponseFormat) -> None:
        await call.start()
        while True:
            for index, piece, prompt_logprobs in await call.pieces():
                run.log.add(b"".join(format.chunks(index, piece, prompt_logprobs)))
                if piece.finish:
                    run.log.add(format.finish(index, piece.finish, None))
            if call.finished:
                run.log.add(format.usage(call.usage(), call.story()))
                return
