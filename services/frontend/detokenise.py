"""One choice's tokens become text: whole characters only, stop strings held back, log probabilities in step with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.model.tokenizer import Tokenizer
from baton.v1.worker_pb2 import Logprob
from services.frontend.stops import StopStrings

TOLD = 64
"""Characters of text after which a decoder knows that it is in the middle of one."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """A shown token, the offset of its text in the choice's text, and its log probability."""

    token_id: int
    offset: int
    logprob: Logprob


class Piece(NamedTuple):
    """What one event adds to a choice: text to show (maybe none), shown tokens (when asked for), how it ended."""

    text: str
    tokens: list[TokenText]
    finish: str
    ids: Sequence[int] = ()
    """Every token taken, when they are asked for; one that ends the output and is not shown included."""
    taken: int = 0
    """How many tokens that were."""
    stop: str = ""
    """The stop string that ended the choice."""


@dataclass(frozen=True, slots=True)
class Show:
    """What a client wants to see beside the text: control tokens, the stop string that ended it, token ids."""

    special: bool = False
    stop: bool = False
    ids: bool = False


@dataclass(slots=True)
class _Pending:
    token: TokenText
    end: int | None
    """Where its text ends; None while a character that it began is still missing bytes."""


class ChoiceText:
    """The text side of one choice. It survives a resume: a new attempt goes on where the last one ended."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str],
        ends: frozenset[int],
        min_tokens: int,
        max_tokens: int,
        show: Show = Show(),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """`ends` are the token ids that end an output and are not shown. Stop strings count only after `min_tokens`.
        `shown`: control tokens that are text here."""
        self._tokenizer = tokenizer
        self._show = show
        self._stream = tokenizer.stream(show_special=show.special)
        self._told = ""
        """The end of what came as text since the last token."""
        self._stops = StopStrings(stops, include=show.stop)
        self._tell_ids = show.ids
        self._ends = ends
        self._shown_ids = shown or {}
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._pending: deque[_Pending] = deque()
        self._decoded = 0
        self._shown = 0
        self.tokens = 0
        """Tokens taken so far, an end token included: what usage counts."""
        self.finish = ""

    def push(self, ids: Sequence[int], logprobs: Sequence[Logprob], finish: str) -> Piece:
        """Take the next tokens; `logprobs` is empty or one for each. After the end, everything is ignored."""
        if self.finish:
            return Piece("", [], "")
        text, before = "", self.tokens
        if ids and self._told:
            self._go_on_from_text()
        for position, token_id in enumerate(ids):
            if self.tokens >= self._max_tokens:
                finish = finish or "length"
                break
            self.tokens += 1
            if finish == "stop" and position == len(ids) - 1 and token_id in self._ends:
                break
            delta = self._shown_ids.get(token_id) or self._stream.push(token_id)
            start = self._decoded
            self._decoded += len(delta)
            if logprobs:
                self._pending.append(_Pending(TokenText(token_id, start, logprobs[position]), None))
                if delta:
                    self._close_pending()
            text += delta if self.tokens <= self._min_tokens else self._stops.push(delta)
            if self._stops.stopped:
                finish = "stop"
                break
        taken = self.tokens - before
        return self._shown_piece(text, finish, ids[:taken] if self._tell_ids else (), taken)

    def push_text(self, text: str, tokens: int, finish: str) -> Piece:
        """Take what an engine answered as text, for `tokens` tokens. It begins with a whole character: of one that
        tokens before had only begun, nothing is left to show."""
        if self.finish:
            return Piece("", [], "")
        if text and not self._told:
            self._stream = self._tokenizer.stream()
        if self.tokens >= self._max_tokens and text:
            return self._shown_piece("", finish or "length")
        self._told = (self._told + text)[-TOLD:]
        self.tokens += tokens
        self._decoded += len(text)
        shown = text if self.tokens <= self._min_tokens else self._stops.push(text)
        return self._shown_piece(shown, "stop" if self._stops.stopped else finish, taken=tokens)

    def _shown_piece(self, text: str, finish: str, ids: Sequence[int] = (), taken: int = 0) -> Piece:
        if finish and not self._stops.stopped:
            text += self._stops.flush()
        self._shown += len(text)
        self.finish = finish
        return Piece(text, self._release(), finish, ids, taken, self._stops.matched)

    def _go_on_from_text(self) -> None:
        """Tokens after text: the decoder hears that text first, for it may treat a beginning otherwise."""
        self._stream = self._tokenizer.stream(show_special=self._show.special)
        for token_id in self._tokenizer.encode_continuation(self._told):
            self._stream.push(token_id)
        self._told = ""

    def _close_pending(self) -> None:
        """A character is whole: it ends for every token that gave bytes to it."""
        for entry in reversed(self._pending):
            if entry.end is not None:
                break
            entry.end = self._decoded

    def _release(self) -> list[TokenText]:
        """Tokens whose text is shown; at the end, every one of which something was shown."""
        out: list[TokenText] = []
        while self._pending:
            entry = self._pending[0]
            visible = entry.end is not None and entry.end <= self._shown
            if self._stops.stopped:
                visible = visible or entry.token.offset < self._shown
            elif self.finish:
                visible = True
            if not visible:
                break
            out.append(entry.token)
            self._pending.popleft()
        return out
