"""A refusal in the shape of the API that was asked."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from baton.errors import BatonError
from services.frontend import anthropic
from services.frontend.anthropic import errors as anthropic_errors
from services.frontend.errors import error_response
from services.frontend.request_id import SCOPE_KEY


def refusal(scope: Scope, error: BatonError, headers: dict[str, str] | None = None) -> Response:
    """What a request is answered that fails before its first byte."""
    if anthropic.owns(scope["path"]):
        return anthropic_errors.error_response(error, scope.get(SCOPE_KEY, ""), headers)
    return error_response(error, headers)
