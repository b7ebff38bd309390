"""Files and batches as OpenAPI describes them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_TIME: Json = {"type": ["integer", "null"]}
_NAME: Json = {"type": ["string", "null"]}


def _object(kind: str, properties: Json) -> Json:
    properties = {"id": _STRING, "object": {"const": kind}, **properties}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _query(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "schema": schema}


def _id(kind: str) -> list[Json]:
    schema = {"type": "string", "pattern": f"^{kind}[0-9a-f]{{24}}$"}
    return [{"name": "id", "in": "path", "required": True, "schema": schema}]


FILE = _object(
    "file",
    {
        "bytes": _COUNT,
        "created_at": _COUNT,
        "expires_at": _TIME,
        "filename": _STRING,
        "purpose": {"enum": ["batch", "batch_output"]},
        "status": {"const": "processed"},
        "status_details": _NAME,
        "baton": {"type": "object", "properties": {"sha256": _STRING, "lines": _COUNT}},
    },
)
DELETED = _object("file", {"deleted": {"const": True}})
BATCH = _object(
    "batch",
    {
        "endpoint": _STRING,
        "model": _NAME,
        "errors": {"type": ["object", "null"]},
        "input_file_id": _STRING,
        "completion_window": {"const": "24h"},
        "status": _STRING,
        "output_file_id": _NAME,
        "error_file_id": _NAME,
        "created_at": _COUNT,
        "expires_at": _COUNT,
        **{
            f"{status}_at": _TIME
            for status in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        },
        "request_counts": {
            "type": "object",
            "properties": {"total": _COUNT, "completed": _COUNT, "failed": _COUNT},
            "required": ["total", "completed", "failed"],
        },
        "usage": {
            "type": "object",
            "properties": {"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT},
            "required": ["input_tokens", "output_tokens", "total_tokens"],
        },
        "metadata": {"type": ["object", "null"]},
    },
)
LIST: Json = {
    "type": "object",
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array"},
        "first_id": _NAME,
        "last_id": _NAME,
        "has_more": {"type": "boolean"},
    },
    "required": ["object", "data", "first_id", "last_id", "has_more"],
}
FILE_ID, BATCH_ID = _id("file-"), _id("batch_")
PAGE = [_query("limit", {"type": "integer", "minimum": 1, "maximum": 100}), _query("after", _STRING)]
LIST_OF_FILES = [
    _query("purpose", _STRING),
    _query("order", {"enum": ["asc", "desc"]}),
    _query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}),
    _query("after", _STRING),
]
