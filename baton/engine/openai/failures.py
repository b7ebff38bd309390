"""What an upstream's failure means here: from HTTP statuses and error bodies to our reasons. Pure.

A request's own fault goes to the client as such; whatever is the upstream's fault is retryable, so another worker of
the model is tried. A refused key or a model that is gone is the operator's business and never a client's 401 or 404.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from baton.errors import BatonError, Reason

MAX_SAID = 500
"""Characters of an upstream's own words in a message of ours."""
_TOO_LONG = re.compile(
    r"context[ _]length|maximum context|context size|max_model_len|max_seq_len|max_input_length|input_length|too long"
    r"|max_num_tokens|exceeds the available context|must be <= \d+|longer than the maximum",
    re.IGNORECASE,
)
_BY_STATUS = {
    401: Reason.DECODE_UNAVAILABLE,
    403: Reason.DECODE_UNAVAILABLE,
    404: Reason.DECODE_UNAVAILABLE,
    405: Reason.DECODE_UNAVAILABLE,
    408: Reason.DECODE_UNAVAILABLE,
    409: Reason.NO_CAPACITY,
    413: Reason.REQUEST_TOO_LARGE,
    429: Reason.NO_CAPACITY,
    502: Reason.DECODE_UNAVAILABLE,
    503: Reason.DECODE_UNAVAILABLE,
    504: Reason.DECODE_UNAVAILABLE,
}


class UpstreamError(BatonError):
    """A failure that the upstream told by an HTTP `status` (or in words: 0)."""

    def __init__(self, reason: Reason, message: str, status: int, param: str | None = None) -> None:
        super().__init__(reason, message, param=param)
        self.status = status


def from_status(status: int, body: bytes) -> UpstreamError:
    """The failure that an answer other than 200 is."""
    said, param = _said(body)
    return _failure(status, said, param)


def from_event(error: Any) -> UpstreamError:
    """The failure that an `error` in the middle of a stream is."""
    code = error.get("code") if isinstance(error, dict) else None
    said, param = _words(error)
    return _failure(code if isinstance(code, int) else 500, said, param)


def _failure(status: int, said: str, param: str | None) -> UpstreamError:
    if status in (400, 413, 422, 500) and _TOO_LONG.search(said):
        return UpstreamError(Reason.CONTEXT_LENGTH_EXCEEDED, f"the upstream says: {said}", status, param)
    if status in (400, 422):
        return UpstreamError(Reason.INVALID_REQUEST, f"the upstream says: {said}", status, param)
    reason = _BY_STATUS.get(status, Reason.ENGINE_FAILED)
    return UpstreamError(reason, f"the upstream answers {status}: {said}", status)


def _said(body: bytes) -> tuple[str, str | None]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:MAX_SAID].decode(errors="replace").strip() or "nothing", None
    return _words(answer.get("error", answer) if isinstance(answer, dict) else answer)


def _words(error: Any) -> tuple[str, str | None]:
    """Its words, and the field at fault when it names one."""
    if not isinstance(error, dict):
        return str(error)[:MAX_SAID], None
    said = error.get("message") or error.get("detail") or error.get("error") or error
    param = error.get("param")
    return str(said)[:MAX_SAID], param if isinstance(param, str) else None
