"""Answers in OpenAI's shapes: SSE chunks and whole bodies, for chat and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from baton.errors import BatonError
from baton.model.tokenizer import Tokenizer
from baton.v1.worker_pb2 import Logprob
from services.frontend.detokenise import Piece, TokenText
from services.frontend.errors import error_event
from services.frontend.lines import one_line
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
    token_ids: Sequence[int] | UnsetType = UNSET


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class _Chunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[_ChatChoice | _TextChoice]
    usage: Usage | UnsetType | None = UNSET
    baton: dict[str, Any] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Format(Protocol):
    """How one request's outputs are written. One instance for each request."""

    def chunks(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> list[bytes]:
        """Events that tell a piece of output `index`, its end excepted."""

    def finish(self, index: int, reason: str, baton: dict[str, Any] | None) -> bytes:
        """The event that ends output `index`; the last one of a request carries `baton`."""

    def so_far(self, usage: Usage) -> None:
        """What the next events say of usage, for clients that want to see it grow."""

    def usage(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        """The event with the usage and no choices."""

    def body(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        """The whole answer, of every piece that `collect` was given."""

    def collect(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> None:
        """Keep a piece for `body`."""

    def done(self) -> bytes:
        """What ends a whole stream."""

    def failed(self, error: BatonError) -> bytes:
        """The last event of a stream that has begun and cannot go on."""


class _Base:
    """What both formats share: the head of every object, and event framing."""

    object_name = ""
    chunk_name = ""
    id_prefix = ""

    def __init__(
        self,
        uid: str,
        created: int,
        model: str,
        fingerprint: str,
        *,
        outputs: int,
        include_usage: bool,
        prompt_ids: Sequence[Sequence[int]] | None,
    ) -> None:
        """`prompt_ids`: of each output, when token ids are told."""
        self._head = (self.id_prefix + uid, created, model, fingerprint)
        # With include_usage, every chunk has the field: null until the last.
        self._usage_so_far: Usage | UnsetType | None = None if include_usage else UNSET
        self._prompt_ids = None if prompt_ids is None else [list(ids) for ids in prompt_ids]
        self._began: set[int] = set()
        self._text = [""] * outputs
        self._finish = [""] * outputs
        self._ids: list[list[int]] = [[] for _ in range(outputs)]

    def so_far(self, usage: Usage) -> None:
        self._usage_so_far = usage

    def done(self) -> bytes:
        return DONE

    def failed(self, error: BatonError) -> bytes:
        return error_event(error)

    def _new_ids(self, piece: Piece) -> list[int] | UnsetType:
        return UNSET if self._prompt_ids is None else list(piece.ids)

    def _event(
        self,
        choices: Sequence[Any],
        baton: dict[str, Any] | None = None,
        usage: Usage | None = None,
        prompt_ids: Sequence[int] | UnsetType = UNSET,
    ) -> bytes:
        id, created, model, fingerprint = self._head
        chunk = _Chunk(
            id,
            self.chunk_name,
            created,
            model,
            fingerprint,
            choices,
            self._usage_so_far if usage is None else usage,
            UNSET if baton is None else baton,
            prompt_ids,
        )
        return b"data: " + one_line(_encode(chunk)) + b"\n\n"

    def usage(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        return self._event([], baton, usage)

    def _body(
        self, choices: list[dict[str, Any]], usage: Usage, baton: dict[str, Any], more: dict[str, Any] | None = None
    ) -> bytes:
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
                **(more or {}),
            }
        )


class ChatFormat(_Base):
    """`/v1/chat/completions`. `top` is None without log probabilities."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(
        self, *head: Any, tokenizer: Tokenizer, top: int | None, outputs: int, voice: Voice = PLAIN, **told: Any
    ) -> None:
        super().__init__(*head, outputs=outputs, **told)
        self._spoken = [Spoken(voice, f"{head[0]}/{index}") for index in range(outputs)] if voice != PLAIN else None
        self._tokenizer = tokenizer
        self._top = top
        self._tokens: list[list[TokenText]] = [[] for _ in range(outputs)]

    def chunks(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> list[bytes]:
        out = self._begin(index)
        deltas = [_Delta(content=piece.text)] if piece.text or piece.tokens or piece.ids else []
        if self._spoken is not None:
            spoken = [_Delta(**delta) for delta in self._spoken[index].deltas(piece)]
            deltas = spoken or ([_Delta(content="")] if piece.tokens or piece.ids else [])
        for number, delta in enumerate(deltas):
            if number:
                out.append(self._event([_ChatChoice(index, delta)]))
            else:
                logprobs, ids = self._logprobs(piece.tokens), self._new_ids(piece)
                out.append(self._event([_ChatChoice(index, delta, logprobs, token_ids=ids)]))
        return out

    def finish(self, index: int, reason: str, baton: dict[str, Any] | None) -> bytes:
        if self._spoken is not None:
            reason = self._spoken[index].speech.finish_reason(reason)
        return self._event([_ChatChoice(index, _Delta(), finish_reason=reason)], baton)

    def collect(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> None:
        self._text[index] += piece.text
        self._tokens[index] += piece.tokens
        self._finish[index] = piece.finish
        self._ids[index] += piece.ids
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
        if self._prompt_ids is None:
            return self._body(choices, usage, baton)
        for choice, ids in zip(choices, self._ids, strict=True):
            choice["token_ids"] = ids
        return self._body(choices, usage, baton, {"prompt_token_ids": self._prompt_ids[0]})

    def _begin(self, index: int) -> list[bytes]:
        if index in self._began:
            return []
        first = not self._began
        self._began.add(index)
        prompt_ids = self._prompt_ids[0] if first and self._prompt_ids is not None else UNSET
        return [self._event([_ChatChoice(index, _Delta(role="assistant", content=""))], prompt_ids=prompt_ids)]

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
        **told: Any,
    ) -> None:
        super().__init__(*head, outputs=len(echoes), **told)
        self._logprobs = None if top is None else TextLogprobs(tokenizer, top)
        self._echoes = echoes
        self._base = [0 if echo is None else len(echo[0]) for echo in echoes]
        self._lists: list[dict[str, Any] | None] = [None] * len(echoes)

    def chunks(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> list[bytes]:
        out = []
        first = index not in self._began
        prompt_ids = self._prompt_ids[index] if first and self._prompt_ids is not None else UNSET
        echo = self._begin(index, prompt_logprobs)
        if echo is not None or prompt_ids is not UNSET:
            text, lists = echo or ("", None)
            out.append(self._event([_TextChoice(index, text, lists, prompt_token_ids=prompt_ids)]))
        if piece.text or piece.tokens or piece.ids:
            lists = self._output(index, piece)
            out.append(self._event([_TextChoice(index, piece.text, lists, token_ids=self._new_ids(piece))]))
        return out

    def finish(self, index: int, reason: str, baton: dict[str, Any] | None) -> bytes:
        return self._event([_TextChoice(index, "", finish_reason=reason)], baton)

    def collect(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> None:
        echo = self._begin(index, prompt_logprobs)
        if echo is not None:
            self._text[index], self._lists[index] = echo
        self._text[index] += piece.text
        self._finish[index] = piece.finish
        self._ids[index] += piece.ids
        new = self._output(index, piece)
        if new is not None:
            lists = self._lists[index]
            if lists is None:
                self._lists[index] = new
            else:
                for name, values in new.items():
                    lists[name].extend(values)

    def body(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        choices: list[dict[str, Any]] = [
            {"index": i, "text": text, "logprobs": self._lists[i], "finish_reason": self._finish[i]}
            for i, text in enumerate(self._text)
        ]
        if self._prompt_ids is not None:
            for choice, ids, prompt_ids in zip(choices, self._ids, self._prompt_ids, strict=True):
                choice |= {"token_ids": ids, "prompt_token_ids": prompt_ids}
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
        return text, None if self._logprobs is None else self._logprobs.prompt(text, ids, logprobs)

    def _output(self, index: int, piece: Piece) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs.output(piece.tokens, self._base[index])
