"""Errors as OpenAI clients expect them: one body, whatever went wrong and whenever."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from baton.errors import BatonError, Reason
from services.frontend.lines import one_line

_encode = msgspec.json.Encoder().encode


def error_object(error: BatonError) -> dict[str, Any]:
    """`{"message", "type", "param", "code"}`."""
    spec = error.reason.spec
    return {"message": error.message, "type": spec.openai_type, "param": error.param, "code": spec.openai_code}


def error_body(error: BatonError) -> bytes:
    """The JSON body of a refused request."""
    return _encode({"error": error_object(error)})


def error_event(error: BatonError) -> bytes:
    """The same as the last event of a stream that has begun."""
    return b"data: " + one_line(error_body(error)) + b"\n\n"


def error_headers(error: BatonError) -> dict[str, str]:
    """`Retry-After` (whole seconds, at least 1) where a retry can help."""
    retry = error.reason.spec.retry_after_s
    return {} if retry is None else {"retry-after": str(max(1, math.ceil(retry)))}


def error_response(error: BatonError, headers: dict[str, str] | None = None) -> Response:
    """A whole response for a request that was refused before its first byte."""
    return Response(
        error_body(error),
        status_code=error.reason.spec.http_status,
        media_type="application/json",
        headers=error_headers(error) | (headers or {}),
    )


def invalid(message: str, param: str | None = None) -> BatonError:
    """The client's fault, with the field."""
    return BatonError(Reason.INVALID_REQUEST, message, param=param)


def internal() -> BatonError:
    """What a client is told about a fault of ours: the log has the rest."""
    return BatonError(Reason.INTERNAL, "The server had an error while processing the request.")
