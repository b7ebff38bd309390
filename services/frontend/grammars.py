"""Whether grammars compile, seen before any worker is asked: in the thread or process that reads the body."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict

from baton.engine.port import Grammar
from baton.errors import BatonError
from baton.grammar.compile import Vocabulary
from baton.model.card import Model
from services.frontend.errors import invalid

MAX_KNOWN = 512


class GrammarCheck:
    """Knows of the last grammars whether they compile. Thread-safe."""

    def __init__(self, model: Model) -> None:
        tokenizer = model.tokenizer
        self._vocabulary = Vocabulary(lambda: tokenizer, tokenizer.vocab_size, model.generation.eos_ids)
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Build the vocabulary: it holds the interpreter's lock for 0.2 s, which streams would wait for."""
        if self._vocabulary.eos_ids:
            with contextlib.suppress(ValueError):  # then each grammar is refused, in the same words
                self._vocabulary.built()

    def check(self, grammar: Grammar, param: str, what: str = "the grammar") -> None:
        """Raises BatonError(INVALID_REQUEST, `param`) in the compiler's words."""
        digest = hashlib.blake2b(f"{grammar.kind}\0{grammar.text}".encode(), digest_size=16).digest()
        with self._lock:
            wrong = self._known.get(digest)
            if wrong is not None:
                self._known.move_to_end(digest)
        if wrong is None:
            wrong = self._compiled(grammar)
            with self._lock:
                self._known[digest] = wrong
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        if wrong:
            raise invalid(f"Invalid '{param}': {what} cannot be used: {wrong}", param)

    def _compiled(self, grammar: Grammar) -> str:
        if not self._vocabulary.eos_ids:
            return "the model has no end-of-text token"
        try:
            self._vocabulary.compile(grammar)
        except BatonError as error:
            return error.message
        return ""
