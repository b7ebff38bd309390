"""Getting to know an upstream at start: wait until it is there, then find out what it takes by asking it.

A server that is loading its weights refuses connections or has no model yet: it is waited for. A refused key, a model
that is not there beside others that are, and a server without `/v1/completions` are the operator's to mend, at once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import structlog

from baton.engine.openai.body import completion
from baton.engine.openai.client import Upstream
from baton.engine.openai.dialect import BY_NAME, Dialect, known_by
from baton.engine.openai.failures import UpstreamError
from baton.engine.openai.options import UpstreamOptions
from baton.engine.openai.prompt import PromptForm, as_upstream_takes
from baton.engine.openai.stream import ChoiceStream
from baton.engine.port import SamplingParams
from baton.errors import BatonError, Reason
from baton.model.tokenizer import Tokenizer

RETRY_S = 1.0
TRIAL_TEXT = "The quick brown fox jumps"
TRIAL_S = 60.0
_HOPELESS = (Reason.UNAUTHORIZED, Reason.MODEL_NOT_FOUND)
_LOADING = (429, 502, 503)

_log = structlog.get_logger()


@dataclass(frozen=True)
class Joined:
    """What an upstream turned out to be. `max_context` is 0 when it does not tell."""

    dialect: Dialect
    form: PromptForm
    max_context: int


async def join(upstream: Upstream, options: UpstreamOptions, tokenizer: Tokenizer) -> Joined:
    """Wait for the server and try it. Raises BatonError(ENGINE_FAILED) with what the operator has to know."""
    end = time.monotonic() + options.start_s
    while True:
        described = await _wait(upstream, max(0.0, end - time.monotonic()))
        try:
            return await _tried(upstream, options, tokenizer, described)
        except BatonError as error:
            # llama.cpp names its model before it has loaded it.
            loading = isinstance(error.__cause__, UpstreamError) and error.__cause__.status in _LOADING
            if not loading or time.monotonic() >= end:
                raise
        await asyncio.sleep(RETRY_S)


async def _tried(
    upstream: Upstream, options: UpstreamOptions, tokenizer: Tokenizer, described: dict[str, Any]
) -> Joined:
    owner = str(described.get("owned_by") or "")
    dialect = BY_NAME.get(options.dialect) or known_by(owner)
    form = PromptForm.TEXT
    if options.prompts != PromptForm.TEXT and await _takes_tokens(upstream, dialect, tokenizer):
        form = PromptForm.TOKENS
    elif options.prompts == PromptForm.TOKENS:
        raise BatonError(Reason.ENGINE_FAILED, f"{upstream.url} does not take token ids as a prompt: --prompts text")
    else:
        try:
            await _try(upstream, dialect, tokenizer, PromptForm.TEXT)
        except BatonError as error:
            raise _hopeless(error) from error
    joined = Joined(dialect, form, options.max_context or _context(described))
    _log.info("upstream joined", url=upstream.url, model=upstream.model, owner=owner, **_told(joined))
    return joined


async def _wait(upstream: Upstream, within_s: float) -> dict[str, Any]:
    end = time.monotonic() + within_s
    told = False
    while True:
        try:
            return await upstream.describe()
        except BatonError as error:
            if error.reason in _HOPELESS or time.monotonic() >= end:
                raise BatonError(Reason.ENGINE_FAILED, f"no upstream: {error.message}") from error
            if not told:
                _log.info("waiting for the upstream", url=upstream.url, why=error.message, within_s=within_s)
            told = True
        await asyncio.sleep(RETRY_S)


async def _takes_tokens(upstream: Upstream, dialect: Dialect, tokenizer: Tokenizer) -> bool:
    """Whether token ids are a prompt to it, and stay what they are."""
    try:
        counted = await _try(upstream, dialect, tokenizer, PromptForm.TOKENS)
    except UpstreamError as error:
        if error.status not in (400, 415, 422, 500):
            raise _hopeless(error) from error
        _log.info("prompts go as text", url=upstream.url, why=error.message)
        return False
    ids = tokenizer.encode(TRIAL_TEXT, add_special=False)
    if counted not in (0, len(ids)):
        _log.warning("prompts go as text: the upstream counts ids otherwise", sent=len(ids), counted=counted)
        return False
    return True


async def _try(upstream: Upstream, dialect: Dialect, tokenizer: Tokenizer, form: PromptForm) -> int:
    """One short completion; how many prompt tokens it counted (0: it does not tell). Raises BatonError."""
    prompt = as_upstream_takes(tokenizer, form, tokenizer.encode(TRIAL_TEXT, add_special=False), ())
    sampling = SamplingParams(max_tokens=2, seed=1, temperature=0.0)
    body = completion(upstream.model, prompt, sampling, dialect, emitted=0, choice=0)
    stream = ChoiceStream("trial", 0, 0, 2)
    async with upstream.completion(body, TRIAL_S, TRIAL_S) as chunks:
        async for _ in stream.read(chunks):
            pass
    return stream.prompt_tokens


def _hopeless(error: BatonError) -> BatonError:
    needed = "; it needs /v1/completions" if isinstance(error, UpstreamError) and error.status in (404, 405) else ""
    return BatonError(Reason.ENGINE_FAILED, f"a trial completion failed: {error.message}{needed}")


def _context(described: dict[str, Any]) -> int:
    """How long prompt and output may be together, as far as `/v1/models` tells."""
    meta = described.get("meta")
    told = [described.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None]
    return next((length for length in told if isinstance(length, int) and length > 0), 0)


def _told(joined: Joined) -> dict[str, object]:
    return {"dialect": joined.dialect.name, "prompts": joined.form.value, "max_context": joined.max_context}
