"""What a frontend is made of, and how a body becomes a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import BatonError, Reason
from baton.model.card import Model
from services.frontend.api_keys import ApiKeys
from services.frontend.asked import Api, Asked, Unread
from services.frontend.batches.batches import Batches
from services.frontend.call import Ask, Call
from services.frontend.chunks import ChatFormat, Format, TextFormat
from services.frontend.detokenise import Show
from services.frontend.drain import Requests
from services.frontend.explain import explain
from services.frontend.gate import Gate
from services.frontend.lately import AWAY_S, LONG_AWAY_S
from services.frontend.metrics import FrontendMetrics
from services.frontend.reader import BodyReader
from services.frontend.ready import Readiness
from services.frontend.request import Backend
from services.frontend.respond import Prepared
from services.frontend.responses.store import ResponseStore
from services.frontend.sampling import make_sampling, output_budget
from services.frontend.schema import Options
from services.frontend.turn import Turn

COMPLETION_TOKENS = 16
"""OpenAI's default budget of `/v1/completions`."""


@dataclass(frozen=True)
class Frontend:
    """Everything the routes need, wired by `main`."""

    model: Model
    backend: Backend
    bodies: BodyReader
    gate: Gate
    readiness: Readiness
    metrics: FrontendMetrics
    request_timeout_s: float
    client_stall_s: float
    max_body_bytes: int
    created: int
    responses: ResponseStore
    requests: Requests = field(default_factory=Requests)
    api_keys: ApiKeys | None = None
    """Who may ask; None: everybody."""
    cors_origins: Sequence[str] = ()
    """Web origins whose pages may ask; `*`: all."""
    batches: Batches | None = None
    """None: this frontend keeps no files."""

    def context_length(self, away_s: float = AWAY_S) -> int:
        """Tokens that prompt and output may have together: the model's limit, or that of the workers, those who left
        within `away_s` included, where it is less."""
        whole = self.model.context_length
        return min(whole, self.backend.router.lately.longest(self.model.name, away_s) or whole)

    def model_object(self) -> dict[str, Any]:
        """The model as `/v1/models` shows it."""
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "baton",
            "max_model_len": self.context_length(),
        }

    async def prepare(
        self,
        body: bytes | bytearray,
        uid: str,
        tenant: str,
        *,
        chat: bool,
        timeout_s: float | None = None,
        turns: Callable[[int], Turn] | None = None,
    ) -> Prepared:
        """Read a tenant's body and make of it what can be started; `turns`: in the batch lane, with a time of its own.

        Raises BatonError when it is not right, or not in time.
        """
        begun = time.time()
        api, away_s = Api.CHAT if chat else Api.COMPLETION, AWAY_S if turns is None else LONG_AWAY_S
        asked, asks = await self.read(body, api, tenant, away_s=away_s)
        call = self.call(uid, asks, asked.options, begun, timeout_s, turns)
        format = self._format(asked, self.head(uid, begun))
        options = asked.options
        return Prepared(call, format, options.stream, options.include_usage, options.continuous_usage)

    async def explain(self, body: bytes | bytearray, uid: str, tenant: str) -> dict[str, Any]:
        """Read a tenant's body of a chat or of a completion, and say where it would run. Raises BatonError."""
        begun = time.time()
        asked, asks = await self.read(body, Api.EITHER, tenant)
        if len(asks) > 1:
            raise BatonError(Reason.INVALID_REQUEST, "One prompt at a time can be explained.", param="prompt")
        (ask,) = asks
        deadline = begun + self.request_timeout_s
        return await explain(self.backend, ask.work(uid, asked.options.n, deadline))

    async def read(
        self, body: bytes | bytearray, api: Api, tenant: str, earlier: bytes | None = None, *, away_s: float = AWAY_S
    ) -> tuple[Asked, list[Ask]]:
        """A tenant's checked body, and what it asks for. Raises BatonError when it is not right, or not in time."""
        limit = self.context_length(away_s)
        try:
            async with asyncio.timeout(self.request_timeout_s):
                asked = await self.bodies.read(Unread(body, api, limit, earlier, tenant))
        except TimeoutError:
            raise BatonError(Reason.DEADLINE_EXCEEDED, "The request took longer than it may to be read.") from None
        return asked, [] if api is Api.COUNT else self._asks(asked, limit)

    def _asks(self, asked: Asked, limit: int) -> list[Ask]:
        options, defaults = asked.options, self.model.generation
        prompt_logprobs = asked.echo and options.logprobs is not None
        asks = []
        for prompt in asked.prompts:
            if asked.chat:
                budget = output_budget(options, len(prompt.ids), limit, None, options.given or "messages")
            else:
                budget = output_budget(options, len(prompt.ids), limit, COMPLETION_TOKENS, "prompt")
            sampling = make_sampling(options, defaults, budget, prompt_logprobs=prompt_logprobs, grammar=asked.grammar)
            show = Show(options.show_special, options.include_stop, options.token_ids)
            shown = dict(asked.voice.shown)
            # A grammar of calls has its own end: a stop string would cut them in the middle of their JSON.
            stops = () if asked.voice.tools and asked.grammar is not None else options.stop
            asks.append(Ask(prompt, sampling, budget, stops, show, prompt_logprobs, shown))
        return asks

    def _format(self, asked: Asked, head: tuple[str, int, str, str]) -> Format:
        options, prompts = asked.options, asked.prompts
        told = {
            "tokenizer": self.model.tokenizer,
            "top": options.logprobs,
            "include_usage": options.include_usage,
            "prompt_ids": [p.ids for p in prompts for _ in range(options.n)] if options.token_ids else None,
        }
        if asked.chat:
            return ChatFormat(*head, outputs=options.n, voice=asked.voice, **told)
        echoes = [(p.text, p.ids) if asked.echo else None for p in prompts for _ in range(options.n)]
        return TextFormat(*head, echoes=echoes, **told)

    def call(
        self,
        uid: str,
        asks: list[Ask],
        options: Options,
        begun: float,
        timeout_s: float | None = None,
        turns: Callable[[int], Turn] | None = None,
        *,
        promised: bool = False,
    ) -> Call:
        """What can be started, of a request that arrived at `begun` (Unix seconds); see `prepare` and `Call`."""
        deadline = begun + (timeout_s or self.request_timeout_s)
        return Call(uid, asks, options.n, deadline, self.model.tokenizer, self.backend, turns, promised=promised)

    def head(self, uid: str, begun: float) -> tuple[str, int, str, str]:
        """What every object of an answer begins with: uid, time, model, fingerprint."""
        card = self.model.card
        return uid, int(begun), self.model.name, f"fp_{card.weights[:6]}{card.tokenizer[:4]}"
