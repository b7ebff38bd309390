"""What streams from the upstream now, what waits for a place, and what is learnt from both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace

from baton.engine.openai.body import completion
from baton.engine.openai.client import Upstream
from baton.engine.openai.join import Joined
from baton.engine.openai.options import UpstreamOptions
from baton.engine.openai.prompt import as_upstream_takes
from baton.engine.openai.rates import Rates
from baton.engine.openai.stream import ChoiceStream
from baton.engine.port import EngineStats, FinishReason, Request, TokenEvent
from baton.model.tokenizer import Tokenizer


class Runs:
    """`max_streams` choices at once; the others wait in line."""

    def __init__(
        self,
        upstream: Upstream,
        options: UpstreamOptions,
        joined: Joined,
        tokenizer: Tokenizer,
        heard: Callable[[], None],
    ) -> None:
        """`heard` is called with each chunk that comes."""
        self._upstream = upstream
        self._options = options
        self._joined = joined
        self._tokenizer = tokenizer
        self._heard = heard
        self._places = asyncio.Semaphore(options.max_streams)
        self._rates = Rates()
        self._stats = EngineStats()
        self._waiting = 0
        self._running = 0
        self._prompts = 0
        """Tokens of prompts whose first token has not come."""
        self._parted = False
        """A request with a tenant or a salt was here: what the server has cached is no longer everybody's to know."""

    def stats(self) -> EngineStats:
        """Load, totals and rates."""
        return replace(
            self._stats,
            running=self._running,
            waiting=self._waiting,
            queued_prefill_tokens=self._prompts,
            prefill_tok_s=self._rates.prefill_tok_s,
            decode_step_s=self._rates.decode_step_s,
        )

    async def run(self, request: Request, choice: int) -> AsyncGenerator[TokenEvent]:
        """The events of one choice. Raises BatonError; closing it closes the connection."""
        emitted, tokens = len(request.emitted_ids), len(request.prompt_ids) + len(request.emitted_ids)
        left = request.sampling.max_tokens - emitted
        if left <= 0:
            yield TokenEvent(request.uid, request.attempt, choice, 0, finish=FinishReason.LENGTH, text="")
            return
        joined, self._parted = self._joined, self._parted or request.parted
        stream = ChoiceStream(request.uid, request.attempt, choice, left)
        with contextlib.ExitStack() as ahead:
            ahead.enter_context(self._prompt_ahead(tokens))
            async with self._place():
                prompt = as_upstream_takes(self._tokenizer, joined.form, request.prompt_ids, request.emitted_ids)
                sampling, model = request.sampling, self._upstream.model
                # The root is a digest: it tells the server neither the tenant nor the salt.
                salt = request.key_root.hex() if request.parted else ""
                body = completion(model, prompt, sampling, joined.dialect, emitted=emitted, choice=choice, salt=salt)
                began = time.monotonic()
                options = self._options
                async with (
                    self._upstream.completion(body, options.first_s, options.stall_s) as chunks,
                    aclosing(stream.read(chunks)) as events,
                ):
                    async for event in events:
                        self._heard()
                        ahead.close()
                        if event.finish is not None:
                            self._learn(stream, tokens, began)
                        yield replace(event, cached_tokens=0) if self._parted else event

    def _learn(self, stream: ChoiceStream, tokens: int, began: float) -> None:
        cached, now = min(stream.cached_tokens, tokens), time.monotonic()
        if stream.first_at:
            self._rates.first_token(tokens - cached, stream.first_at - began)
            self._rates.ended(stream.tokens, now - stream.first_at)
        self._stats = replace(
            self._stats,
            prompt_tokens=self._stats.prompt_tokens + tokens,
            cached_prompt_tokens=self._stats.cached_prompt_tokens + cached,
            prefill_tokens_computed=self._stats.prefill_tokens_computed + tokens - cached,
            output_tokens=self._stats.output_tokens + stream.tokens,
        )

    @contextlib.contextmanager
    def _prompt_ahead(self, tokens: int) -> Iterator[None]:
        self._prompts += tokens
        try:
            yield
        finally:
            self._prompts -= tokens

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._places.release()
