"""The rates a worker starts with, measured on this machine before it registers: a short prefill and a few steps.

It warms the engine up as well, so that the first request does not pay for it. The router learns better rates later.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import structlog

from baton.engine.port import Engine, EngineSpec, PrefillDone, Request, SamplingParams, TokenEvent
from baton.errors import BatonError
from baton.v1 import registry_pb2
from baton.worker.registration import TRANSFER_BYTES_S

PROMPT_TOKENS = 256
STEPS = 8
LIMIT_S = 60.0

_log = structlog.get_logger()


async def measure_rates(engine: Engine, spec: EngineSpec) -> registry_pb2.Rates:
    """Prefill and decode rates of an idle engine; zero (the router's defaults) where it does not manage in time.

    Consumes `engine.events()`: run it before anything else does.
    """
    prompt = [i % min(spec.vocab_size, 64) for i in range(min(PROMPT_TOKENS, spec.max_context // 2))]
    sampling = SamplingParams(max_tokens=STEPS, seed=0, temperature=0.0, ignore_eos=True)
    request = Request("calibration", 1, prompt, sampling, os.urandom(16), time.time() + LIMIT_S)
    rates = registry_pb2.Rates(transfer_bytes_s=TRANSFER_BYTES_S)
    try:
        async with asyncio.timeout(LIMIT_S):
            reservation = await engine.reserve(request)
            try:
                started = time.monotonic()
                async for event in engine.prefill(reservation):
                    if isinstance(event, PrefillDone):
                        rates.prefill_tok_s = len(prompt) / (time.monotonic() - started)
                        await engine.generate(reservation, event.first)
                rates.decode_step_s = await _decode_step_s(engine)
            finally:
                await reservation.release()
    except (TimeoutError, BatonError) as error:
        _log.warning("rates not measured", error=str(error))
    await engine.clear_cache()
    return rates


async def _decode_step_s(engine: Engine) -> float:
    """Seconds of one step of one stream, over the steps of the calibration request."""
    times: list[float] = []
    steps = cast("AsyncGenerator[list[TokenEvent], None]", engine.events())
    async with aclosing(steps):
        async for events in steps:
            for event in events:
                times.append(time.monotonic())
                if event.finish is not None or event.error is not None:
                    return (times[-1] - times[0]) / max(1, len(times) - 1)
    return 0.0
