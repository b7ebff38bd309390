"""A response in OpenAI's shapes: the events of a stream, or one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.errors import BatonError, Reason
from baton.model.tokenizer import Tokenizer
from baton.v1.worker_pb2 import Logprob
from services.frontend.chunks import Usage
from services.frontend.detokenise import Piece
from services.frontend.lines import one_line
from services.frontend.logprobs import chat_logprobs
from services.frontend.responses.output import Output
from services.frontend.speech import Speech, Voice

PREFIX = "resp_"
_encode = msgspec.json.Encoder().encode
_BUSY = frozenset({Reason.NO_CAPACITY, Reason.QUOTA_EXCEEDED})


@dataclass(frozen=True)
class Final:
    """How a response ended, and the object that is told."""

    status: str
    response: dict[str, Any]


Keep = Callable[[Final], None]


class ResponseFormat:
    """Of one request with one output. `head`: the members of the object that do not change; `top`: None without log
    probabilities. `keep` is called with the end, before anybody is told of it."""

    def __init__(
        self, uid: str, created: int, head: dict[str, Any], *, voice: Voice, tokenizer: Tokenizer, top: int | None,
        keep: Keep | None = None,
    ) -> None:  # fmt: skip
        self.id = PREFIX + uid
        self._head = {"id": self.id, "object": "response", "created_at": created, **head}
        self._speech = Speech(voice)
        self._tokenizer = tokenizer
        self._top = top
        self._keep = keep
        self._output = Output(uid, self._tell, short_ids=voice.tools == "mistral", logprobs=top is not None)
        self._events: list[bytes] | None = None
        self._pending: list[Any] = []
        """Log probabilities of tokens whose text the parsers still hold."""
        self.sequence = 0
        """The number of the next event."""
        self._cut = False
        self.final: Final | None = None
        """How it ended."""

    # ---- as a stream

    def chunks(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> list[bytes]:
        events = self.begin()
        self._take(piece)
        return events + self._told()

    def finish(self, index: int, reason: str, baton: dict[str, Any] | None) -> bytes:
        self._end(reason)
        return b"".join(self._told())

    def so_far(self, usage: Usage) -> None:
        """Usage is told at the end only."""

    def usage(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        final = self._final(usage, baton)
        self._tell(f"response.{final.status}", response=final.response)
        return b"".join(self._told())

    def done(self) -> bytes:
        return b""

    def failed(self, error: BatonError) -> bytes:
        events = self.begin()
        final = self.stopped("failed", error)
        self._tell("response.failed", response=final.response)
        return b"".join(events + self._told())

    def begin(self, first: str = "in_progress") -> list[bytes]:
        """The events before any output, once."""
        if self._events is not None:
            return []
        self._events = []
        self._tell("response.created", response=self.object(first))
        self._tell("response.in_progress", response=self.object("in_progress"))
        return self._told()

    # ---- as one object

    def collect(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> None:
        self._take(piece)
        if piece.finish:
            self._end(piece.finish)

    def body(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        return _encode(self._final(usage, baton).response)

    def object(self, status: str, **members: Any) -> dict[str, Any]:
        """The response as it is now."""
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **members,
        }

    def stopped(self, status: str, error: BatonError | None = None) -> Final:
        """It ends before its time: "failed" with why, or "cancelled". What there is of its output stays."""
        if self._output.items:
            self._output.close(complete=False)
        told = None
        if error is not None:
            code = "rate_limit_exceeded" if error.reason in _BUSY else "server_error"
            told = {"code": code, "message": error.message}
        return self._ended(Final(status, self.object(status, error=told, output=self._output.items)))

    # ---- both

    def _take(self, piece: Piece) -> None:
        if self._top is not None:
            self._pending += chat_logprobs(piece.tokens, self._tokenizer, self._top)["content"]
        events = self._speech.push(piece.text, piece.taken) if piece.text or piece.taken else []
        if piece.finish:
            events = events + self._speech.end()
        if events:
            self._output.take(events, self._pending)
            self._pending = []

    def _end(self, reason: str) -> None:
        self._cut = reason == "length"
        self._output.close(complete=not self._cut)

    def _final(self, usage: Usage, baton: dict[str, Any]) -> Final:
        status = "incomplete" if self._cut else "completed"
        response = self.object(
            status,
            completed_at=None if self._cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if self._cut else None,
            output=self._output.items,
            usage=self._usage(usage),
            baton=baton,
        )
        return self._ended(Final(status, response))

    def _ended(self, final: Final) -> Final:
        self.final = final
        if self._keep is not None:
            self._keep(final)
        return final

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(self._speech.thought_tokens, usage.completion_tokens)},
            "total_tokens": usage.total_tokens,
        }

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._events is not None:
            event = {"type": kind, "sequence_number": self.sequence, **fields}
            self.sequence += 1
            self._events.append(b"event: " + kind.encode() + b"\ndata: " + one_line(_encode(event)) + b"\n\n")

    def _told(self) -> list[bytes]:
        events, self._events = self._events or [], []
        return events
