"""Whether an upstream can be counted on.

    chunks arrive                                    well, whatever the probes say
    connection refused, key refused, model gone      unwell at once
    no answer in time, 5xx                           unwell after `PATIENCE` probes in a row
    an answer that names our model                   well

A server that computes on the thread that answers probes is slow to answer them, and one that is told to leave takes no
connections while it ends its streams: chunks that come are the better sign.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from baton.engine.openai.client import Upstream
from baton.engine.openai.failures import UpstreamError
from baton.errors import BatonError

PROBE_EACH_S = 1.0
PROBE_S = 2.0
PATIENCE = 2

_log = structlog.get_logger()


class Health:
    """What the probes say. `why` is empty while the upstream is well; `since` is `time.time()` of when it began not to
    be, 0 while it is."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float] = time.monotonic) -> None:
        self.why = ""
        self.since = 0.0
        self._upstream = upstream
        self._clock = clock
        self._failures = 0
        self._heard_at = -PROBE_S
        self._soon = asyncio.Event()

    def heard(self) -> None:
        """A chunk has come."""
        self._heard_at = self._clock()

    def doubt(self) -> None:
        """A request could not reach it, or broke off: probe now."""
        self._soon.set()

    async def run(self) -> None:
        """Probe for ever. One task of the engine."""
        while True:
            await self.probe()
            try:
                async with asyncio.timeout(PROBE_EACH_S):
                    await self._soon.wait()
            except TimeoutError:
                pass
            else:
                self._soon.clear()
                await asyncio.sleep(PROBE_EACH_S / 10)  # many may doubt at once

    async def probe(self) -> None:
        """Ask once, and judge."""
        began = self._clock()
        try:
            await self._upstream.describe(PROBE_S)
        except BatonError as error:
            told = not isinstance(error, UpstreamError) and self._clock() - began < PROBE_S
            self._failed(error.message, at_once=told)
            return
        if self.why:
            _log.info("upstream is back", url=self._upstream.url, away_s=round(time.time() - self.since, 1))
        self._failures, self.why, self.since = 0, "", 0.0

    def _failed(self, why: str, *, at_once: bool) -> None:
        self._failures += 1
        streaming = self._clock() - self._heard_at < PROBE_S
        if self.why or ((at_once or self._failures >= PATIENCE) and not streaming):
            if not self.why:
                self.since = time.time()
                _log.warning("upstream is not well", url=self._upstream.url, why=why)
            self.why = why
