"""A gRPC server with what each of ours has: health, reflection, keepalive, and errors with their reasons."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.errors import BatonError, Reason
from baton.rpc.errors import PARAM_KEY, REASON_KEY
from baton.rpc.limits import SERVER_OPTIONS

_log = structlog.get_logger()


class RpcServer:
    """Serves on `host:port`; port 0 takes any free one."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server = grpc.aio.server(interceptors=[_Errors()], options=SERVER_OPTIONS)
        self._names: list[str] = []
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(  # type: ignore[no-untyped-call]
            self._health, self._server
        )

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: object, name: str) -> None:
        """Serve `servicer` under its full proto `name`, with the generated `add_..._to_server`."""
        add_to_server(servicer, self._server)
        self._names.append(name)

    async def start(self) -> int:
        """Listen; the port. Raises BatonError(INVALID_REQUEST) naming the address when it is taken."""
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            port = self._server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            raise BatonError(
                Reason.INVALID_REQUEST, f"cannot listen on {self._host}:{self._port}: in use or not ours", param="port"
            ) from error
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        return int(port)

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers, for the whole server and for each service by name."""
        status = health_pb2.HealthCheckResponse
        await self._set_health(status.SERVING if serving else status.NOT_SERVING)

    async def _set_health(self, status: Any) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end them."""
        await self._server.stop(grace_s)


class _Errors(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """BatonError becomes its status with the reason in trailing metadata; anything else is logged and INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _guard_call(handler.unary_unary, method), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, method), handler.request_deserializer, handler.response_serializer
            )
        return handler


def _guard_call(behaviour: Any, method: str) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _abort(error, method, context)

    return guarded


def _guard_stream(behaviour: Any, method: str) -> Any:
    """Both of gRPC's ways to stream are legal: an async generator, or a coroutine that calls `context.write`."""
    if not inspect.isasyncgenfunction(behaviour):
        return _guard_call(behaviour, method)

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async for message in behaviour(request, context):
                yield message
        except Exception as error:
            await _abort(error, method, context)

    return guarded


async def _abort(error: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, BatonError):
        _log.error("call failed", method=method, exc_info=error)
        error = BatonError(Reason.INTERNAL, f"{type(error).__name__} in {method}; see the log of this process")
    trailing = [(REASON_KEY, error.reason.name)]
    if error.param:
        trailing.append((PARAM_KEY, error.param))
    await context.abort(error.reason.spec.grpc_status, error.message, tuple(trailing))
