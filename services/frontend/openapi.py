"""The API as OpenAPI 3.1: `/openapi.json`. Bodies are described by `reference.py`, answers and errors here."""

from __future__ import annotations

from typing import Any

from services.frontend.batches import described as batches
from services.frontend.listing import BATCHES, CHAT, COMPLETIONS, FILES, Json
from services.frontend.openapi_native import native_paths
from services.frontend.openapi_talks import talk_paths
from services.frontend.reference import fields

_REFUSALS = {
    "400": "the request is wrong: `param` names the field",
    "401": "no valid API key",
    "404": "another model, or no such thing",
    "409": "it is in use",
    "413": "the body is too large",
    "415": "the body is not JSON in UTF-8",
    "429": "everything is full, or a quota is used up: `Retry-After` says when to come back",
    "503": "nobody is there to serve it now: `Retry-After` says when to come back",
    "504": "it took longer than it may",
}
_NULL = {"type": "null"}
_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_IDS: Json = {"type": "array", "items": _COUNT}


def _object(properties: Json, *optional: str) -> Json:
    """An object with all of `properties`, the `optional` ones aside."""
    return {"type": "object", "properties": properties, "required": [n for n in properties if n not in optional]}


_ERROR = _object(
    {
        "error": _object(
            {"message": _STRING, "type": _STRING, "param": {"type": ["string", "null"]}, "code": {"type": "string"}}
        )
    }
)
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)
_EVENT = _object({"data": _STRING})
_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_MODEL = _object(
    {"id": _STRING, "object": {"const": "model"}, "created": _COUNT, "owned_by": _STRING, "max_model_len": _COUNT}
)
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "refusal": _NULL,
        "reasoning_content": _STRING,
        "reasoning": _STRING,
        "tool_calls": {"type": "array"},
    },
    "reasoning_content",
    "reasoning",
    "tool_calls",
)


def _answer(kind: str, choice: Json) -> Json:
    choice |= {
        "index": _COUNT,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": _FINISH,
        "token_ids": _IDS,
        "prompt_token_ids": _IDS,
    }
    answer: Json = {
        "id": _STRING,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _STRING,
        "system_fingerprint": _STRING,
        "choices": {"type": "array", "items": _object(choice, "token_ids", "prompt_token_ids"), "minItems": 1},
        "usage": _USAGE,
        "baton": {"type": "object"},
        "prompt_token_ids": _IDS,
    }
    return _object(answer, "prompt_token_ids")


def _body(path: str, model: str) -> Json:
    known = {field.name: field for field in fields(path) if field.schema is not None and "." not in field.name}
    properties = {name: dict(field.schema or {}, description=field.note) for name, field in known.items()}
    if "model" in properties:
        properties["model"] = {"enum": [model] if known["model"].required else [model, None]}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name, field in known.items() if field.required],
    }


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _refusals(*statuses: str, error: Json = _ERROR) -> Json:
    return {status: {"description": _REFUSALS[status], "content": _json(error)} for status in statuses}


def _post(path: str, model: str, summary: str, answer: Json, *, streams: bool, error: Json = _ERROR) -> Json:
    content = _json(answer) | ({"text/event-stream": {"schema": _EVENT}} if streams else {})
    body = _body(path, model)
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {
            "200": {"description": "the answer", "content": content},
            **_refusals(*(s for s in _REFUSALS if s != "409"), error=error),
        },
    }


def _send(summary: str, content: Json, answer: Json) -> Json:
    refusals = _refusals("400", "401", "404", "413", "415", "429", "503")
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "the answer", "content": _json(answer)}, **refusals},
    }


def _form(path: str) -> Json:
    body = _body(path, "")
    body["properties"]["file"]["format"] = "binary"
    return {"multipart/form-data": {"schema": body}}


def _get(summary: str, answer: Json, *refusals: str, kind: str = "application/json", **more: Any) -> Json:
    responses = {"200": {"description": "the answer", "content": {kind: {"schema": answer}}}, **_refusals(*refusals)}
    return {"summary": summary, "responses": responses, **more}


def describe(model: str, *, keys: bool) -> Json:
    """The whole description of a server of `model`; `keys`: it asks for API keys."""
    named = {"name": "model", "in": "path", "required": True, "schema": {"enum": [model]}}
    chat = _answer("chat.completion", {"message": _MESSAGE})
    ready = _object({"ready": {"type": "boolean"}, "missing": {"type": "array"}})
    probe = _get("whether a completion can be served", ready, security=[])
    probe["responses"]["503"] = {"description": "not now", "content": _json(ready)}
    paths: Json = {
        CHAT: {"post": _post(CHAT, model, "chat", chat, streams=True)},
        COMPLETIONS: {
            "post": _post(
                COMPLETIONS, model, "completions", _answer("text_completion", {"text": _STRING}), streams=True
            )
        },
        **talk_paths(model, _post, _get),
        **native_paths(model, _post, _get),
        "/v1/baton/explain": {
            "post": _post(CHAT, model, "where a chat or a completion would run", {"type": "object"}, streams=False)
        },
        "/v1/models": {
            "get": _get("the served model", _object({"object": {"const": "list"}, "data": {"type": "array"}}), "401")
        },
        "/v1/models/{model}": {"get": _get("the served model, by name", _MODEL, "401", "404", parameters=[named])},
        FILES: {
            "post": _send("upload a file", _form(FILES), batches.FILE),
            "get": _get("the files", batches.LIST, "400", "401", "404", parameters=batches.LIST_OF_FILES),
        },
        "/v1/files/{id}": {
            "get": _get("one file", batches.FILE, "401", "404", parameters=batches.FILE_ID),
            "delete": _get("remove a file", batches.DELETED, "401", "404", "409", parameters=batches.FILE_ID),
        },
        "/v1/files/{id}/content": {
            "get": _get("its bytes", _STRING, "401", "404", kind="application/octet-stream", parameters=batches.FILE_ID)
        },
        BATCHES: {
            "post": _send("run a batch", _json(_body(BATCHES, model)), batches.BATCH),
            "get": _get("the batches", batches.LIST, "400", "401", "404", parameters=batches.PAGE),
        },
        "/v1/batches/{id}": {"get": _get("one batch", batches.BATCH, "401", "404", parameters=batches.BATCH_ID)},
        "/v1/batches/{id}/cancel": {
            "post": _get("end a batch", batches.BATCH, "400", "401", "404", parameters=batches.BATCH_ID)
        },
        "/openapi.json": {"get": _get("this description", {"type": "object"}, security=[])},
        "/health": {"get": _get("whether the process lives", _object({"status": {"const": "ok"}}), security=[])},
        "/ready": {"get": probe},
        "/metrics": {"get": _get("Prometheus", _STRING, kind="text/plain", security=[])},
    }
    scheme: Json = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1", "description": "The OpenAI API, as docs/api.md says."},
        "paths": paths,
        "components": scheme,
        "security": [{"key": []}] if keys else [],
    }
