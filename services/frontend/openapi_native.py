"""Embeddings, vLLM's and SGLang's own endpoints in the OpenAPI description."""

from __future__ import annotations

from collections.abc import Callable

from services.frontend.embeddings import PATH as EMBEDDINGS
from services.frontend.listing import Json
from services.frontend.sglang import PATH as GENERATE
from services.frontend.tokens import DETOKENIZE, TOKENIZE

Describe = Callable[..., Json]
_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_IDS: Json = {"type": "array", "items": _COUNT}


def _object(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


_EMBEDDINGS = _object(
    {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": _object(
                {
                    "object": {"const": "embedding"},
                    "index": _COUNT,
                    "embedding": {"anyOf": [_STRING, {"type": "array", "items": {"type": "number"}, "minItems": 1}]},
                }
            ),
            "minItems": 1,
        },
        "model": _STRING,
        "usage": _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
    }
)
_TOKENS = _object(
    {
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": _IDS,
        "token_strs": {"type": ["array", "null"], "items": _STRING},
    }
)
_GENERATED = _object({"text": _STRING, "output_ids": _IDS, "meta_info": {"type": "object"}})
_MODEL_INFO = _object({"model_path": _STRING, "tokenizer_path": _STRING, "is_generation": {"const": True}})


def native_paths(model: str, post: Describe, get: Describe) -> Json:
    """Their paths; `post` and `get` describe one method of a path."""
    generated = {"anyOf": [_GENERATED, {"type": "array", "items": _GENERATED}]}
    generate = post(GENERATE, model, "text and token-id prompts, as SGLang's", generated, streams=True)
    info = {"get": get("the served model, as SGLang tells it", _MODEL_INFO, "401")}
    server = {"get": get("the server, as SGLang tells it", _MODEL_INFO, "401")}
    flush = get("forget cached prefixes", _STRING, "401", "503", kind="text/plain")
    health = get("a token from the model", _STRING, "401", "429", "503", "504", kind="text/plain")
    return {
        EMBEDDINGS: {"post": post(EMBEDDINGS, model, "embeddings", _EMBEDDINGS, streams=False)},
        TOKENIZE: {"post": post(TOKENIZE, model, "token ids of a text", _TOKENS, streams=False)},
        DETOKENIZE: {
            "post": post(DETOKENIZE, model, "the text of token ids", _object({"prompt": _STRING}), streams=False)
        },
        GENERATE: {"post": generate, "put": generate},
        "/get_model_info": info,
        "/model_info": info,
        "/get_server_info": server,
        "/server_info": server,
        "/health_generate": {"get": health},
        "/flush_cache": {"get": flush, "post": flush},
        "/version": {"get": get("Baton's version", _object({"version": _STRING}), security=[])},
    }
