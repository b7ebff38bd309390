"""Log probabilities in the two shapes of the API: chat's objects, completions' parallel lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from baton.model.tokenizer import Tokenizer
from baton.v1.worker_pb2 import Logprob
from services.frontend.detokenise import TokenText

LEAST = -9999.0
"""What JSON says for minus infinity."""


def token_string(data: bytes) -> str:
    """A token as text; bytes that are no whole characters are spelled out."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokens: Sequence[TokenText], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """`choices[].logprobs` of chat; `top` most likely tokens each."""
    return {
        "content": [_chat_token(token.logprob, token.token_id, tokenizer, top) for token in tokens],
        "refusal": None,
    }


def _chat_token(logprob: Logprob, token_id: int, tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    best = list(zip(logprob.top_ids, logprob.top_logprobs, strict=False))[:top]
    entry = _entry(tokenizer, token_id, logprob.logprob)
    return entry | {"top_logprobs": [_entry(tokenizer, i, value) for i, value in best]}


def _entry(tokenizer: Tokenizer, token_id: int, value: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": token_string(data), "logprob": _finite(value), "bytes": list(data)}


class TextLogprobs:
    """`choices[].logprobs` of completions, with running text offsets."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top

    def output(self, tokens: Sequence[TokenText], base: int) -> dict[str, Any]:
        """Of output tokens; `base` is how much echoed text stands before them."""
        return self._lists([(t.token_id, t.logprob, base + t.offset) for t in tokens])

    def prompt(self, text: str, ids: Sequence[int], logprobs: Sequence[Logprob]) -> dict[str, Any]:
        """Of an echoed prompt with that text. The first token has none; `logprobs` may leave it out."""
        missing = len(ids) - len(logprobs)
        offset = 0
        stream = self._tokenizer.stream(show_special=True)
        rows: list[tuple[int, Logprob | None, int]] = []
        for position, token_id in enumerate(ids):
            known = position > 0 and position >= missing
            rows.append((token_id, logprobs[position - missing] if known else None, offset))
            shown = stream.push(token_id)
            # A BOS that the tokenizer put before the client's text is no part of it.
            added = position == 0 and self._tokenizer.is_special(token_id) and not text.startswith(shown)
            offset += 0 if added else len(shown)
        return self._lists(rows)

    def _lists(self, rows: Sequence[tuple[int, Logprob | None, int]]) -> dict[str, Any]:
        return {
            "tokens": [self._string(token_id) for token_id, _, _ in rows],
            "token_logprobs": [None if logprob is None else _finite(logprob.logprob) for _, logprob, _ in rows],
            "top_logprobs": [self._best(token_id, logprob) for token_id, logprob, _ in rows],
            "text_offset": [offset for _, _, offset in rows],
        }

    def _best(self, token_id: int, logprob: Logprob | None) -> dict[str, float] | None:
        if logprob is None:
            return None
        best = list(zip(logprob.top_ids, logprob.top_logprobs, strict=False))[: self._top]
        return {self._string(i): _finite(value) for i, value in [*best, (token_id, logprob.logprob)]}

    def _string(self, token_id: int) -> str:
        return token_string(self._tokenizer.token_bytes(token_id))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST
