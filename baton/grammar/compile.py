"""Compiling: a grammar and a vocabulary become a matcher. Bounded in size, time and memory; frees the GIL meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.engine.port import Grammar
from baton.errors import BatonError, Reason
from baton.grammar.source import source
from baton.model.tokenizer import Tokenizer

MAX_BYTES = 256 << 10
"""Of one grammar's text."""
MAX_ERROR = 1000
"""Characters of the compiler's words that a client is told."""


def limits() -> LLParserLimits:
    """What one grammar may take, by the library's figures: 20 ms to build its lexer, 14 ms and 2.5 ms of lexer and
    parser for one mask, 50 to 100 MB when every state of its lexer has been met."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


@dataclass(frozen=True)
class Program:
    """A compiled grammar. `matcher` stands before the first token: each output follows a copy."""

    grammar: Grammar
    matcher: LLMatcher
    vocabulary: Vocabulary


class Vocabulary:
    """The tokens as the compiler sees them, `vocab_size` wide as the logits are, `eos_ids` (at least one) ending an
    output. Read and built at first use, or by `built` when it suits: 0.3 s and 17 MB for 49,000 tokens. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.eos_ids = list(eos_ids)
        self._lock = threading.Lock()
        self._wrapper: _Wrapper | None = None
        self._built: LLTokenizer | None = None

    def built(self) -> LLTokenizer:
        """For matchers."""
        with self._lock:
            if self._built is None:
                self._wrapper = _Wrapper(self._tokenizer(), self._vocab_size, self.eos_ids)
                self._built = LLTokenizer(self._wrapper, eos_token=self.eos_ids)  # type: ignore[arg-type]
            return self._built

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, once built; of a special one its name."""
        assert self._wrapper is not None
        return self._wrapper.tokens[token_id]

    def token_id(self, text: str) -> int | None:
        """The added token of exactly this text, once built; None when there is none."""
        assert self._wrapper is not None
        found: int | None = self._wrapper.tokenizer.backend.token_to_id(text) if text else None
        return found

    def compile(self, grammar: Grammar) -> Program:
        """Raises BatonError(INVALID_REQUEST, param "grammar") in the compiler's words."""
        if len(grammar.text.encode()) > MAX_BYTES:
            raise refused(f"it has more than {MAX_BYTES} bytes")
        try:
            text = source(grammar)
        except RecursionError:
            raise refused("it is nested too deeply") from None
        except ValueError as error:
            raise refused(str(error)) from error
        try:
            matcher = LLMatcher(self.built(), text, log_level=0, limits=limits())
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the compiler is no Exception
            raise refused(f"the compiler fails on it: {type(error).__name__}") from error
        if matcher.is_error():
            raise refused(matcher.get_error())
        if wrong := _first_steps(matcher.deep_copy()):
            raise refused(wrong)
        return Program(grammar, matcher, self)


def _first_steps(matcher: LLMatcher) -> str:
    """What goes wrong as soon as it is followed: some of what is too much shows only then."""
    matcher.compute_bitmask()
    if forced := matcher.compute_ff_tokens():
        matcher.consume_tokens(forced)
        matcher.compute_bitmask()
    return matcher.get_error()


def refused(message: str) -> BatonError:
    """A grammar that cannot be, and why."""
    return BatonError(Reason.INVALID_REQUEST, message[:MAX_ERROR].strip(), param="grammar")


class _Wrapper:
    """Our tokenizer in the shape that llguidance asks for. Text is what our streams show as text: an added token that
    is not special may stand where a grammar wants its characters (`<tool_call>` in Qwen's vocabulary)."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: list[int]) -> None:
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) or f"<unused-{i}>".encode() for i in range(vocab_size)]
        known = tokenizer.vocab_size
        self.special_token_ids = [
            i for i, _ in enumerate(self.tokens) if i >= known or tokenizer.is_special(i) or i in eos_ids
        ]
        self.tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        # Forced text goes on where other text ended: some vocabularies would put a space before it.
        return self.tokenizer.encode_continuation(text)
