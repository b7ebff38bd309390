"""Answers of `/generate`: text so far, ids, and `meta_info`; streamed, each event has all of it again, as SGLang's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.errors import BatonError
from baton.model.tokenizer import Tokenizer
from baton.v1.worker_pb2 import Logprob
from services.frontend.chunks import DONE, Usage
from services.frontend.detokenise import Piece
from services.frontend.errors import error_event
from services.frontend.lines import one_line
from services.frontend.logprobs import LEAST, token_string
from services.frontend.sglang.body import Told

_encode = msgspec.json.Encoder().encode
Row = tuple[float | None, int, str | None]
"""Log probability, token id, and its text where that is asked for."""


@dataclass
class Wish:
    """What is told of one prompt. `top`: None without log probabilities; `ends`: ids that end an output."""

    ids: Sequence[int]
    top: int | None
    start: int
    ends: Collection[int]


@dataclass
class _Output:
    text: str = ""
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    stop: str = ""
    finish: str = ""
    input: list[Row] = field(default_factory=list)
    input_top: list[list[Row] | None] = field(default_factory=list)
    output: list[Row] = field(default_factory=list)
    output_top: list[list[Row] | None] = field(default_factory=list)


class GenerateFormat:
    """The outputs of one request, prompt by prompt, `n` of each."""

    def __init__(
        self, uid: str, told: Told, wishes: Sequence[Wish], n: int, tokenizer: Tokenizer, cached: Callable[[int], int]
    ) -> None:
        """`cached`: prompt tokens of an output that were found in a cache, as far as is known."""
        self._rids = told.rids or ([f"{uid}_{i}" for i in range(len(wishes))] if len(wishes) > 1 else [uid])
        self._listed = told.listed or n > 1
        self._spelled = told.texts
        self._wishes = wishes
        self._n = n
        self._tokenizer = tokenizer
        self._cached = cached
        self._begun = time.monotonic()
        self._outputs = [_Output() for _ in range(len(wishes) * n)]

    def chunks(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> list[bytes]:
        """The output so far, when there is more of it."""
        self.collect(index, piece, prompt_logprobs)
        return [self._event(index, None, ended=False)] if piece.text or piece.taken or prompt_logprobs else []

    def collect(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> None:
        """Take a piece in."""
        output, wish = self._outputs[index], self._wishes[index // self._n]
        output.text += piece.text
        output.tokens += piece.taken
        output.ids += piece.ids
        output.stop = piece.stop or output.stop
        output.finish = piece.finish or output.finish
        if wish.top is None:
            return
        if wish.start >= 0 and prompt_logprobs and not output.input:
            self._take_input(output, wish, prompt_logprobs)
        for token in piece.tokens:
            output.output.append(self._row(token.token_id, token.logprob))
            output.output_top.append(self._best(token.logprob, wish.top))

    def _take_input(self, output: _Output, wish: Wish, logprobs: Sequence[Logprob]) -> None:
        """Of the prompt from `start` on. The first token of all follows nothing."""
        assert wish.top is not None
        missing = len(wish.ids) - len(logprobs)
        for position in range(wish.start, len(wish.ids)):
            known = logprobs[position - missing] if position > 0 and position >= missing else None
            output.input.append(self._row(wish.ids[position], known))
            output.input_top.append(None if known is None else self._best(known, wish.top))

    def _row(self, token_id: int, logprob: Logprob | None) -> Row:
        return None if logprob is None else _finite(logprob.logprob), token_id, self._text(token_id)

    def _best(self, logprob: Logprob, top: int) -> list[Row]:
        best = zip(logprob.top_ids, logprob.top_logprobs, strict=False)
        return [(_finite(value), i, self._text(i)) for i, value in list(best)[:top]]

    def _text(self, token_id: int) -> str | None:
        return token_string(self._tokenizer.token_bytes(token_id)) if self._spelled else None

    def finish(self, index: int, reason: str, baton: dict[str, Any] | None) -> bytes:
        """The event that ends an output."""
        return self._event(index, baton, ended=True)

    def so_far(self, usage: Usage) -> None:
        """Every event says it."""

    def usage(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        """There is no such event."""
        return b""

    def body(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        """The whole answer: an object, or a list of them when more than one was asked for."""
        made = [self._object(index, baton, ended=True) for index in range(len(self._outputs))]
        return _encode(made if self._listed else made[0])

    def done(self) -> bytes:
        """As OpenAI's."""
        return DONE

    def failed(self, error: BatonError) -> bytes:
        """One error event and nothing more."""
        return error_event(error)

    def _event(self, index: int, baton: Mapping[str, Any] | None, *, ended: bool) -> bytes:
        made = self._object(index, baton, ended=ended)
        if self._listed:
            made["index"] = index
        return b"data: " + one_line(_encode(made)) + b"\n\n"

    def _object(self, index: int, baton: Mapping[str, Any] | None, *, ended: bool) -> dict[str, Any]:
        output, wish = self._outputs[index], self._wishes[index // self._n]
        meta: dict[str, Any] = {
            "id": self._rids[index // self._n],
            "finish_reason": _finish_reason(output, wish) if ended else None,
            "prompt_tokens": len(wish.ids),
            "completion_tokens": output.tokens,
            "cached_tokens": self._cached(index),
            "weight_version": "default",
        }
        if ended:
            meta["e2e_latency"] = time.monotonic() - self._begun
        if wish.top is not None:
            meta |= {"input_token_logprobs": output.input, "output_token_logprobs": output.output}
            if wish.top:
                meta |= {"input_top_logprobs": output.input_top, "output_top_logprobs": output.output_top}
        if baton is not None:
            meta["baton"] = baton
        return {"text": output.text, "output_ids": output.ids, "meta_info": meta}


def _finish_reason(output: _Output, wish: Wish) -> dict[str, Any]:
    """Why an output ended: its length, a stop string, or a token (which one, where only one can have)."""
    if output.finish == "length":
        return {"type": "length", "length": output.tokens}
    matched: str | int | None = output.stop or None
    if matched is None and len(wish.ends) == 1:
        (matched,) = wish.ends
    return {"type": output.finish, "matched": matched}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST
