"""What a frontend is made of, and how a checked body becomes a job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.errors import BatonError, Reason
from baton.model.card import Model
from services.frontend.call import Ask, Call
from services.frontend.chunks import ChatFormat, TextFormat
from services.frontend.drain import Requests
from services.frontend.metrics import FrontendMetrics
from services.frontend.prompt import PromptPool
from services.frontend.ready import Readiness
from services.frontend.request import Backend
from services.frontend.respond import Job, Prepared
from services.frontend.sampling import make_sampling, output_budget
from services.frontend.schema import Options, model_of, parse_chat, parse_completion

COMPLETION_TOKENS = 16
"""OpenAI's default budget of `/v1/completions`."""


@dataclass(frozen=True)
class Frontend:
    """Everything the routes need, wired by `main`."""

    model: Model
    backend: Backend
    prompts: PromptPool
    readiness: Readiness
    metrics: FrontendMetrics
    request_timeout_s: float
    client_stall_s: float
    max_body_bytes: int
    created: int
    requests: Requests = field(default_factory=Requests)

    def context_length(self) -> int:
        """Tokens that prompt and output may have together: the model's limit, or the workers' where that is less."""
        return context_length(self.model, self.readiness)

    def check_model(self, name: str) -> None:
        """Raises BatonError(MODEL_NOT_FOUND)."""
        if name != self.model.name:
            raise BatonError(Reason.MODEL_NOT_FOUND, f"The model '{name[:200]}' does not exist.", param="model")

    def model_object(self) -> dict[str, Any]:
        """The model as `/v1/models` shows it."""
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "baton",
            "max_model_len": self.context_length(),
        }

    def chat_job(self, raw: Mapping[str, Any], uid: str) -> Job:
        """A job out of a chat body. Raises BatonError when the body is not right."""
        self.check_model(model_of(raw))
        body = parse_chat(raw, self.model.tokenizer.vocab_size)
        options, begun = body.options, time.time()

        async def prepare() -> Prepared:
            prompt = await self.prompts.chat(body.messages, body.variables)
            limit = self.context_length()
            budget = output_budget(options, len(prompt.ids), limit, None, "messages")
            sampling = make_sampling(options, self.model.generation, budget, prompt_logprobs=False)
            call = self._call(uid, [Ask(prompt, sampling, budget, options.stop)], options, begun)
            format = ChatFormat(
                *self._head(uid, begun),
                tokenizer=self.model.tokenizer,
                top=options.logprobs,
                outputs=options.n,
                include_usage=options.include_usage,
            )
            return Prepared(call, format)

        return Job(uid, "chat/completions", options.stream, options.include_usage, prepare)

    def completion_job(self, raw: Mapping[str, Any], uid: str) -> Job:
        """A job out of a completions body. Raises BatonError when the body is not right."""
        self.check_model(model_of(raw))
        body = parse_completion(raw, self.model.tokenizer.vocab_size)
        options, begun = body.options, time.time()
        prompt_logprobs = body.echo and options.logprobs is not None

        async def prepare() -> Prepared:
            asks = []
            for given in body.prompts:
                prompt = await (self.prompts.text(given) if isinstance(given, str) else self.prompts.ids(given))
                budget = output_budget(options, len(prompt.ids), self.context_length(), COMPLETION_TOKENS, "prompt")
                sampling = make_sampling(options, self.model.generation, budget, prompt_logprobs=prompt_logprobs)
                asks.append(Ask(prompt, sampling, budget, options.stop, merged_only=prompt_logprobs))
            echoes = [(a.prompt.text, a.prompt.ids) if body.echo else None for a in asks for _ in range(options.n)]
            format = TextFormat(
                *self._head(uid, begun),
                tokenizer=self.model.tokenizer,
                top=options.logprobs,
                echoes=echoes,
                include_usage=options.include_usage,
            )
            return Prepared(self._call(uid, asks, options, begun), format)

        return Job(uid, "completions", options.stream, options.include_usage, prepare)

    def _call(self, uid: str, asks: list[Ask], options: Options, begun: float) -> Call:
        deadline = begun + self.request_timeout_s
        return Call(uid, asks, options.n, deadline, self.model.tokenizer, self.backend)

    def _head(self, uid: str, begun: float) -> tuple[str, int, str, str]:
        card = self.model.card
        return uid, int(begun), self.model.name, f"fp_{card.weights[:6]}{card.tokenizer[:4]}"


def context_length(model: Model, readiness: Readiness) -> int:
    """The model's limit, or the connected workers' where that is less."""
    return min(model.context_length, readiness.max_context() or model.context_length)
