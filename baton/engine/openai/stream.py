"""One choice from the upstream's first chunk to its last, as token events with text.

A stream ends well when the server said why (`finish_reason`). The last event waits for the usage that follows,
`TRAILER_S` at most, because only that tells how many tokens there were: until then a chunk with text counts as one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from baton.engine.openai.client import Chunks
from baton.engine.port import FinishReason, TokenEvent
from baton.errors import BatonError, Reason

TRAILER_S = 2.0
OVERRUN = 2
"""A server that sends so many times the tokens that it may has not understood `max_tokens`: it is cut off."""
MOST = 2**31 - 1
"""Tokens that a server may say it counted: more is no count."""
_FINISHES = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "content_filter": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
}


class ChoiceStream:
    """Reads one stream. What was learnt on the way stays here."""

    def __init__(self, uid: str, attempt: int, choice: int, max_tokens: int) -> None:
        self.tokens = 0
        self.prompt_tokens = 0
        """As the server counted them; 0 when it did not tell."""
        self.cached_tokens = 0
        self.first_at = 0.0
        """`time.monotonic()` of the first chunk with text."""
        self._name = (uid, attempt, choice)
        self._max_tokens = max_tokens
        self._characters = 0
        self._pieces = 0
        self._told = False
        """Whether the server has said how many tokens there were."""
        self._finish: FinishReason | None = None

    async def read(self, chunks: Chunks) -> AsyncGenerator[TokenEvent]:
        """Its events; the last one has a finish. Raises BatonError when it does not come to that."""
        while self._finish is None:
            chunk = await chunks.next()
            if chunk is None:
                raise BatonError(Reason.ENGINE_FAILED, "the upstream ended its stream without a word why")
            text = self._take(chunk)
            if text:
                yield self._event(text)
        end = time.monotonic() + TRAILER_S
        while time.monotonic() < end and (chunk := await self._trailing(chunks)) is not None:
            self._usage(chunk.get("usage"))
        short = self._finish is FinishReason.LENGTH and self._told and self.tokens < self._max_tokens
        yield self._event("", FinishReason.CONTEXT if short else self._finish)

    def _take(self, chunk: dict[str, Any]) -> str:
        """The text of a chunk; usage and finish are kept. Raises BatonError ENGINE_FAILED for what is no chunk."""
        choices = chunk.get("choices") or []
        text, reason = "", None
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise BatonError(Reason.ENGINE_FAILED, "the upstream sent a chunk whose choices are none")
        if choices:
            text, reason = choices[0].get("text") or "", choices[0].get("finish_reason")
        if not isinstance(text, str):
            raise BatonError(Reason.ENGINE_FAILED, "the upstream sent a text that is none")
        if text:
            self.first_at = self.first_at or time.monotonic()
            self._pieces += 1
            self.tokens += 1
        self._usage(chunk.get("usage"))
        if reason:
            if reason not in _FINISHES:
                raise BatonError(Reason.ENGINE_FAILED, f"the upstream gave up: finish_reason {str(reason)[:80]!r}")
            self._finish = _FINISHES[reason]
        elif self._pieces >= OVERRUN * self._max_tokens + OVERRUN:
            self._finish = FinishReason.LENGTH
        return text

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        told = usage.get("completion_tokens")
        if isinstance(told, int) and 0 < told <= OVERRUN * self._max_tokens + OVERRUN:
            self.tokens, self._told = told, True
        prompt = usage.get("prompt_tokens")
        if isinstance(prompt, int) and 0 < prompt <= MOST:
            self.prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(cached, int) and 0 < cached <= MOST:
            self.cached_tokens = cached

    async def _trailing(self, chunks: Chunks) -> dict[str, Any] | None:
        """What follows the finish, None when nothing does: a failure now takes nothing from the answer."""
        if self._pieces >= OVERRUN * self._max_tokens + OVERRUN:
            return None
        try:
            return await chunks.next(TRAILER_S)
        except BatonError:
            return None

    def _event(self, text: str, finish: FinishReason | None = None) -> TokenEvent:
        uid, attempt, choice = self._name
        before = self._characters
        self._characters += len(text)
        return TokenEvent(
            uid,
            attempt,
            choice,
            before,
            finish=finish,
            text=text,
            text_tokens=self.tokens,
            cached_tokens=self.cached_tokens if finish is not None else 0,
        )
