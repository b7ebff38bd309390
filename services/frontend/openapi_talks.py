"""The Responses API and Anthropic's Messages API in the OpenAPI description."""

from __future__ import annotations

from collections.abc import Callable

from services.frontend.listing import COUNT, MESSAGES, RESPONSES, Json
from services.frontend.responses.routes import MAX_PAGE

Describe = Callable[..., Json]
_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NULLABLE: Json = {"type": ["string", "null"]}


def _object(properties: Json, *optional: str) -> Json:
    return {"type": "object", "properties": properties, "required": [n for n in properties if n not in optional]}


_RESPONSE = _object(
    {
        "id": _STRING,
        "object": {"const": "response"},
        "created_at": _COUNT,
        "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "model": _STRING,
        "output": {"type": "array", "items": _object({"id": _STRING, "type": _STRING, "status": _STRING})},
        "error": {"type": ["object", "null"]},
        "incomplete_details": {"type": ["object", "null"]},
        "usage": {"type": ["object", "null"]},
        "baton": {"type": "object"},
    },
    "baton",
)
_ITEMS = _object(
    {
        "object": {"const": "list"},
        "data": {"type": "array"},
        "first_id": _NULLABLE,
        "last_id": _NULLABLE,
        "has_more": {"type": "boolean"},
    }
)
_MESSAGE = _object(
    {
        "id": _STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _STRING,
        "content": {"type": "array", "items": {"type": "object"}},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": _NULLABLE,
        "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT}),
        "baton": {"type": "object"},
    }
)
_ERROR = _object(
    {
        "type": {"const": "error"},
        "error": _object({"type": _STRING, "message": _STRING, "param": _STRING}, "param"),
        "request_id": _STRING,
    }
)


def talk_paths(model: str, post: Describe, get: Describe) -> Json:
    """The paths of both, made with `openapi.py`'s ways to describe a POST and a GET."""
    id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^resp_[0-9a-f]+$"}}
    page = {
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
        "order": {"enum": ["asc", "desc"]},
        "after": _STRING,
    }
    paged = [id, *({"name": name, "in": "query", "schema": schema} for name, schema in page.items())]
    refused = ("400", "401", "404")
    deleted = _object({"id": _STRING, "object": {"const": "response"}, "deleted": {"const": True}})
    return {
        RESPONSES: {"post": post(RESPONSES, model, "a response", _RESPONSE, streams=True)},
        f"{RESPONSES}/{{id}}": {
            "get": get("a kept response", _RESPONSE, *refused, parameters=[id]),
            "delete": get("forget a response", deleted, *refused, parameters=[id]),
        },
        f"{RESPONSES}/{{id}}/cancel": {
            "post": get("cancel a response in the background", _RESPONSE, *refused, parameters=[id])
        },
        f"{RESPONSES}/{{id}}/input_items": {
            "get": get("what a response was made of", _ITEMS, *refused, parameters=paged)
        },
        MESSAGES: {"post": post(MESSAGES, model, "a message", _MESSAGE, streams=True, error=_ERROR)},
        COUNT: {
            "post": post(
                COUNT, model, "the tokens of a message", _object({"input_tokens": _COUNT}), streams=False, error=_ERROR
            )
        },
    }
