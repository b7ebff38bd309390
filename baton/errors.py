"""Every reason a request can fail, once.

One enum decides the gRPC status, the HTTP status, the OpenAI `type` and `code`, whether a retry can help and
after how long. Code raises `BatonError(Reason.X, "what happened and what to do")`; the edges (gRPC servicers,
HTTP handlers, session frames) translate it with the tables here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import grpc


@dataclass(frozen=True)
class ReasonSpec:
    """How one reason looks from outside.

    `retry_after_s` is None when a retry cannot help, 0 when another worker may be tried at once, and otherwise
    the seconds a client should wait (the `Retry-After` header).
    """

    grpc_status: grpc.StatusCode
    http_status: int
    openai_type: str
    openai_code: str
    retry_after_s: float | None


def _spec(status: grpc.StatusCode, http: int, kind: str, code: str, retry: float | None = None) -> ReasonSpec:
    return ReasonSpec(status, http, kind, code, retry)


_S = grpc.StatusCode


class Reason(Enum):
    """Why a request, or one step of it, failed. The name travels on the wire (`Failure.reason`)."""

    INVALID_REQUEST = _spec(_S.INVALID_ARGUMENT, 400, "invalid_request_error", "invalid_value")
    CONTEXT_LENGTH_EXCEEDED = _spec(_S.INVALID_ARGUMENT, 400, "invalid_request_error", "context_length_exceeded")
    GRAMMAR_UNSUPPORTED = _spec(_S.INVALID_ARGUMENT, 400, "invalid_request_error", "unsupported_value")
    UNAUTHORIZED = _spec(_S.UNAUTHENTICATED, 401, "invalid_request_error", "invalid_api_key")
    MODEL_NOT_FOUND = _spec(_S.NOT_FOUND, 404, "invalid_request_error", "model_not_found")
    NOT_FOUND = _spec(_S.NOT_FOUND, 404, "invalid_request_error", "not_found")
    PREVIOUS_RESPONSE_NOT_FOUND = _spec(_S.NOT_FOUND, 400, "invalid_request_error", "previous_response_not_found")
    METHOD_NOT_ALLOWED = _spec(_S.UNIMPLEMENTED, 405, "invalid_request_error", "method_not_allowed")
    REQUEST_TOO_LARGE = _spec(_S.INVALID_ARGUMENT, 413, "invalid_request_error", "request_too_large")
    UNSUPPORTED_MEDIA_TYPE = _spec(_S.INVALID_ARGUMENT, 415, "invalid_request_error", "unsupported_media_type")
    DUPLICATE_REQUEST = _spec(_S.ALREADY_EXISTS, 409, "invalid_request_error", "duplicate_request")
    QUOTA_EXCEEDED = _spec(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "quota_exceeded", 1.0)
    FILE_IN_USE = _spec(_S.FAILED_PRECONDITION, 409, "invalid_request_error", "file_in_use")
    STORAGE_FULL = _spec(_S.RESOURCE_EXHAUSTED, 400, "invalid_request_error", "storage_full")
    NO_CAPACITY = _spec(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "no_capacity", 1.0)
    DRAINING = _spec(_S.UNAVAILABLE, 503, "server_error", "draining", 0.0)
    DEADLINE_EXCEEDED = _spec(_S.DEADLINE_EXCEEDED, 504, "server_error", "deadline_exceeded")
    ABORTED = _spec(_S.CANCELLED, 499, "server_error", "aborted")
    PREEMPTED = _spec(_S.ABORTED, 503, "server_error", "preempted", 0.0)
    SLOW_CLIENT = _spec(_S.CANCELLED, 499, "server_error", "slow_client")
    KV_LAYOUT_MISMATCH = _spec(_S.FAILED_PRECONDITION, 503, "server_error", "kv_layout_mismatch", 0.0)
    KV_TRANSFER_TIMEOUT = _spec(_S.DEADLINE_EXCEEDED, 503, "server_error", "kv_transfer_timeout", 0.0)
    KV_TRANSFER_FAILED = _spec(_S.UNAVAILABLE, 503, "server_error", "kv_transfer_failed", 0.0)
    KV_CHECKSUM_MISMATCH = _spec(_S.DATA_LOSS, 503, "server_error", "kv_checksum_mismatch", 0.0)
    KV_STALE_EPOCH = _spec(_S.FAILED_PRECONDITION, 503, "server_error", "kv_stale_epoch", 0.0)
    KV_BAD_HANDLE = _spec(_S.INVALID_ARGUMENT, 503, "server_error", "kv_bad_handle", 0.0)
    KV_LEASE_LOST = _spec(_S.ABORTED, 503, "server_error", "kv_lease_lost", 0.0)
    PREFILL_UNAVAILABLE = _spec(_S.UNAVAILABLE, 503, "server_error", "prefill_unavailable", 0.0)
    DECODE_UNAVAILABLE = _spec(_S.UNAVAILABLE, 503, "server_error", "decode_unavailable", 1.0)
    ROUTER_UNAVAILABLE = _spec(_S.UNAVAILABLE, 503, "server_error", "router_unavailable", 1.0)
    STORE_UNAVAILABLE = _spec(_S.UNAVAILABLE, 503, "server_error", "store_unavailable", 0.0)
    REGISTRY_UNAVAILABLE = _spec(_S.UNAVAILABLE, 503, "server_error", "registry_unavailable", 1.0)
    SESSION_LOST = _spec(_S.UNAVAILABLE, 503, "server_error", "session_lost", 0.0)
    VERSION_MISMATCH = _spec(_S.FAILED_PRECONDITION, 503, "server_error", "version_mismatch", 0.0)
    ENGINE_FAILED = _spec(_S.INTERNAL, 500, "server_error", "engine_failed", 0.0)
    INTERNAL = _spec(_S.INTERNAL, 500, "server_error", "internal_error")

    @property
    def spec(self) -> ReasonSpec:
        """The row of the table for this reason."""
        return self.value

    @property
    def retryable(self) -> bool:
        """Whether another attempt, here or elsewhere, can succeed."""
        return self.value.retry_after_s is not None

    @classmethod
    def from_name(cls, name: str) -> Reason:
        """The reason of that wire name; a name from a newer peer that we do not know becomes INTERNAL."""
        return cls.__members__.get(name, cls.INTERNAL)


class BatonError(Exception):
    """A failure with its reason; `param` names the request field at fault, when there is one."""

    def __init__(self, reason: Reason, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return f"{self.reason.name}: {self.message}"
