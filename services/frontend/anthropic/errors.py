"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`; our `param` beside."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from baton.errors import BatonError
from services.frontend.errors import error_headers
from services.frontend.lines import one_line

_encode = msgspec.json.Encoder().encode
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: BatonError, request_id: str) -> bytes:
    """The JSON of a failure; `param` is the field at fault, where there is one."""
    told: dict[str, Any] = {
        "type": _TYPES.get(error.reason.spec.http_status, "invalid_request_error"),
        "message": error.message,
    }
    if error.param is not None:
        told["param"] = error.param
    return _encode({"type": "error", "error": told, "request_id": request_id})


def error_event(error: BatonError, request_id: str) -> bytes:
    """The same as the last event of a stream that has begun."""
    return b"event: error\ndata: " + one_line(error_body(error, request_id)) + b"\n\n"


def error_response(error: BatonError, request_id: str, headers: dict[str, str] | None = None) -> Response:
    """A whole response for a request that was refused before its first byte."""
    return Response(
        error_body(error, request_id),
        status_code=error.reason.spec.http_status,
        media_type="application/json",
        headers=error_headers(error) | (headers or {}),
    )
