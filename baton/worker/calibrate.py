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

from baton.engine import needs
from baton.engine.port import Engine, EngineSpec, PrefillDone, Request, Reservation, SamplingParams, TokenEvent
from baton.errors import BatonError, Reason
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
    length = min(PROMPT_TOKENS, spec.max_context // 2)
    # A server that keeps prompts must not know this one from an earlier start.
    prompt = [byte % min(spec.vocab_size, 64) for byte in os.urandom(length)]
    deaf = needs.IGNORE_EOS not in spec.lacks
    sampling = SamplingParams(max_tokens=STEPS, seed=0, temperature=0.0, ignore_eos=deaf)
    request = Request("calibration", 1, prompt, sampling, os.urandom(16), time.time() + LIMIT_S)
    rates = registry_pb2.Rates(transfer_bytes_s=TRANSFER_BYTES_S)
    try:
        async with asyncio.timeout(LIMIT_S):
            reservation = await engine.reserve(request)
            try:
                started = time.monotonic()
                prefilled = await _begin(engine, reservation, prefills=spec.fingerprint is not None)
                steps = await _steps(engine)
                rates.prefill_tok_s = len(prompt) / max(1e-6, (prefilled or steps[0]) - started)
                rates.decode_step_s = (steps[-1] - steps[0]) / max(1, len(steps) - 1)
            finally:
                await reservation.release()
    except (TimeoutError, BatonError) as error:
        _log.warning("rates not measured", error=str(error))
    await engine.clear_cache()
    return rates


async def _begin(engine: Engine, reservation: Reservation, *, prefills: bool) -> float:
    """Start the request; `time.monotonic()` of when its prompt was computed, 0 from an engine that does not tell."""
    if not prefills:
        await engine.generate(reservation)
        return 0.0
    done = 0.0
    async for event in engine.prefill(reservation):
        if isinstance(event, PrefillDone):
            done = time.monotonic()
            await engine.generate(reservation, event.first)
    return done


async def _steps(engine: Engine) -> list[float]:
    """`time.monotonic()` of each step of the only request. Raises BatonError when it fails."""
    times: list[float] = []
    steps = cast("AsyncGenerator[list[TokenEvent], None]", engine.events())
    async with aclosing(steps):
        async for events in steps:
            for event in events:
                times.append(time.monotonic())
                if event.error is not None:
                    raise BatonError(event.error, event.message)
                if event.finish is not None:
                    return times
    raise BatonError(Reason.ENGINE_FAILED, "the engine's events ended")
