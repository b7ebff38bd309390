"""Failures across gRPC: a `Failure` message inside an answer, or a status with the reason in its trailing metadata."""

from __future__ import annotations

from typing import Any

import grpc

from baton.errors import BatonError, Reason
from baton.v1 import kv_pb2

REASON_KEY = "baton-reason"
PARAM_KEY = "baton-param"


def failure(error: BatonError) -> kv_pb2.Failure:
    """The message that carries `error`."""
    return kv_pb2.Failure(reason=error.reason.name, message=error.message, param=error.param or "")


def from_failure(message: kv_pb2.Failure) -> BatonError:
    """The error that `message` carries; a reason we do not know becomes INTERNAL."""
    return BatonError(Reason.from_name(message.reason), message.message, param=message.param or None)


def from_rpc(error: grpc.aio.AioRpcError, default: Reason) -> BatonError:
    """What a failed call means: the peer's own reason where it gave one, else `default` (it was not reached)."""
    metadata: Any = error.trailing_metadata() or ()
    trailing: dict[str, str | bytes] = dict(metadata)
    name, param = trailing.get(REASON_KEY), trailing.get(PARAM_KEY)
    details = error.details() or error.code().name
    if isinstance(name, str):
        return BatonError(Reason.from_name(name), details, param=param if isinstance(param, str) else None)
    return BatonError(default, f"{error.code().name}: {details}")
