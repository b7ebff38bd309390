"""Answers in OpenAI's shapes: SSE chunks and whole bodies, for chat and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from baton.model.tokenizer import Tokenizer
from baton.v1.worker_pb2 import Logprob
from services.frontend.detokenise import Piece, TokenText
from services.frontend.logprobs import TextLogprobs, chat_logprobs
from services.frontend.speech import PLAIN, Voice
from services.frontend.spoken import Spoken

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """Tokens of a request; all its outputs together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class _Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class _ChatChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[_ChatChoice | _TextChoice]
    usage: Usage | UnsetType | None = UNSET
    baton: dict[str, Any] | UnsetType = UNSET


class Format(Protocol):
    """How one request's outputs are written. One instance for each request."""

    def chunks(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> list[bytes]:
        """Events that tell a piece of output `index`, its end excepted."""

    def finish(self, index: int, reason: str, baton: dict[str, Any] | None) -> bytes:
        """The event that ends output `index`; the last one of a request carries `baton`."""

    def usage(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        """The event with the usage and no choices."""

    def body(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        """The whole answer, of every piece that `collect` was given."""

    def collect(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> None:
        """Keep a piece for `body`."""


class _Base:
    """What both formats share: the head of every object, and event framing."""

    object_name = ""
    chunk_name = ""
    id_prefix = ""

    def __init__(self, uid: str, created: int, model: str, fingerprint: str, *, include_usage: bool) -> None:
        self._head = (self.id_prefix + uid, created, model, fingerprint)
        # With include_usage, every chunk has the field: null until the last.
        self._no_usage: UnsetType | None = None if include_usage else UNSET

    def _event(self, choices: Sequence[Any], baton: dict[str, Any] | None = None, usage: Usage | None = None) -> bytes:
        id, created, model, fingerprint = self._head
        chunk = _Chunk(
            id,
            self.chunk_name,
            created,
            model,
            fingerprint,
            choices,
            self._no_usage if usage is None else usage,
            UNSET if baton is None else baton,
        )
        return b"data: " + _encode(chunk) + b"\n\n"

    def usage(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        return self._event([], baton, usage)

    def _body(self, choices: list[dict[str, Any]], usage: Usage, baton: dict[str, Any]) -> bytes:
        id, created, model, fingerprint = self._head
        return _encode(
            {
                "id": id,
                "object": self.object_name,
                "created": created,
                "model": model,
                "system_fingerprint": fingerprint,
                "choices": choices,
                "usage": usage,
                "baton": baton,
            }
        )


class ChatFormat(_Base):
    """`/v1/chat/completions`. `top` is None without log probabilities."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(
        self,
        *head: Any,
        tokenizer: Tokenizer,
        top: int | None,
        outputs: int,
        include_usage: bool,
        voice: Voice = PLAIN,
    ) -> None:
        super().__init__(*head, include_usage=include_usage)
        self._spoken = [Spoken(voice, f"{head[0]}/{index}") for index in range(outputs)] if voice != PLAIN else None
        self._tokenizer = tokenizer
        self._top = top
        self._began: set[int] = set()
        self._text = [""] * outputs
        self._tokens: list[list[TokenText]] = [[] for _ in range(outputs)]
        self._finish = [""] * outputs

    def chunks(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> list[bytes]:
        out = self._begin(index)
        if self._spoken is not None:
            deltas = self._spoken[index].deltas(piece)
            told = [_Delta(**delta) for delta in deltas] or ([_Delta(content="")] if piece.tokens else [])
            for number, delta in enumerate(told):
                logprobs = self._logprobs(piece.tokens) if number == 0 and piece.tokens else None
                out.append(self._event([_ChatChoice(index, delta, logprobs)]))
        elif piece.text or piece.tokens:
            choice = _ChatChoice(index, _Delta(content=piece.text), self._logprobs(piece.tokens))
            out.append(self._event([choice]))
        return out

    def finish(self, index: int, reason: str, baton: dict[str, Any] | None) -> bytes:
        if self._spoken is not None:
            reason = self._spoken[index].speech.finish_reason(reason)
        return self._event([_ChatChoice(index, _Delta(), finish_reason=reason)], baton)

    def collect(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> None:
        self._text[index] += piece.text
        self._tokens[index] += piece.tokens
        self._finish[index] = piece.finish
        if self._spoken is not None:
            self._spoken[index].collect(piece)

    def body(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": self._logprobs(self._tokens[index]),
                "finish_reason": self._finish[index],
            }
            for index, text in enumerate(self._text)
        ]
        for spoken, choice in zip(self._spoken or (), choices, strict=False):
            choice["message"] |= spoken.message()
            choice["finish_reason"] = spoken.speech.finish_reason(choice["finish_reason"])
        return self._body(choices, usage, baton)

    def _begin(self, index: int) -> list[bytes]:
        if index in self._began:
            return []
        self._began.add(index)
        return [self._event([_ChatChoice(index, _Delta(role="assistant", content=""))])]

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        return None if self._top is None else chat_logprobs(tokens, self._tokenizer, self._top)


class TextFormat(_Base):
    """`/v1/completions`. `echoes` has, for each output, the prompt's text and ids to show before it (or None)."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(
        self,
        *head: Any,
        tokenizer: Tokenizer,
        top: int | None,
        echoes: Sequence[tuple[str, Sequence[int]] | None],
        include_usage: bool,
    ) -> None:
        super().__init__(*head, include_usage=include_usage)
        self._logprobs = None if top is None else TextLogprobs(tokenizer, top)
        self._echoes = echoes
        self._base = [0 if echo is None else len(echo[0]) for echo in echoes]
        self._began: set[int] = set()
        self._text = [""] * len(echoes)
        self._lists: list[dict[str, Any] | None] = [None] * len(echoes)
        self._finish = [""] * len(echoes)

    def chunks(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> list[bytes]:
        out = []
        echo = self._begin(index, prompt_logprobs)
        if echo is not None:
            out.append(self._event([_TextChoice(index, *echo)]))
        if piece.text or piece.tokens:
            out.append(self._event([_TextChoice(index, piece.text, self._output(index, piece))]))
        return out

    def finish(self, index: int, reason: str, baton: dict[str, Any] | None) -> bytes:
        return self._event([_TextChoice(index, "", finish_reason=reason)], baton)

    def collect(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> None:
        echo = self._begin(index, prompt_logprobs)
        if echo is not None:
            self._text[index], self._lists[index] = echo
        self._text[index] += piece.text
        self._finish[index] = piece.finish
        new = self._output(index, piece)
        if new is not None:
            lists = self._lists[index]
            if lists is None:
                self._lists[index] = new
            else:
                for name, values in new.items():
                    lists[name].extend(values)

    def body(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        choices = [
            {"index": i, "text": text, "logprobs": self._lists[i], "finish_reason": self._finish[i]}
            for i, text in enumerate(self._text)
        ]
        return self._body(choices, usage, baton)

    def _begin(self, index: int, logprobs: Sequence[Logprob]) -> tuple[str, dict[str, Any] | None] | None:
        """The prompt, once, before the first output."""
        if index in self._began:
            return None
        self._began.add(index)
        echo = self._echoes[index]
        if echo is None:
            return None
        text, ids = echo
        return text, None if self._logprobs is None else self._logprobs.prompt(ids, logprobs)

    def _output(self, index: int, piece: Piece) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs.output(piece.tokens, self._base[index])
