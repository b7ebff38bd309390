"""From hidden states to the answer: shortened if asked, at unit length, as numbers or base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from baton.errors import BatonError, Reason
from services.frontend.embeddings.body import Told

_encode = msgspec.json.Encoder().encode


def unit(vector: bytes, dimensions: int) -> NDArray[np.float32]:
    """A mean of hidden states (f32, little-endian), its first `dimensions` (0: all), at unit length.

    Raises BatonError(INTERNAL) when it is made of no numbers.
    """
    values = np.frombuffer(vector, "<f4").astype(np.float64)[: dimensions or None]
    length = float(np.linalg.norm(values))
    if not np.isfinite(length):
        raise BatonError(Reason.INTERNAL, "The model's hidden states are no finite numbers.")
    return np.asarray(values / (length or 1.0), dtype="<f4")


def answer(vectors: Sequence[bytes], told: Told, model: str, tokens: int) -> bytes:
    """The body of the answer. Work for a thread: it gives way between two embeddings."""
    size = len(vectors[0]) // 4
    if told.dimensions > size:
        raise BatonError(
            Reason.INVALID_REQUEST, f"'dimensions' must be at least 1 and at most {size}.", param="dimensions"
        )
    parts = [_object(i, unit(vector, told.dimensions), told.format) for i, vector in enumerate(vectors)]
    rest: dict[str, Any] = {"model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return b'{"object":"list","data":[' + b",".join(parts) + b"]," + _encode(rest)[1:]


def _object(index: int, values: NDArray[np.float32], format: str) -> bytes:
    if format == "base64":
        embedding = b'"' + base64.b64encode(values.tobytes()) + b'"'
    else:
        embedding = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    return b'{"object":"embedding","index":%d,"embedding":' % index + embedding + b"}"
