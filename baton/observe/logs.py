"""Structured logs on stderr; stdout belongs to the ready line."""

from __future__ import annotations

import logging
import sys

import structlog
from google.protobuf.message import DecodeError


class _NoTraceOfBadBytes(logging.Filter):
    """gRPC logs a message that cannot be decoded as if it were a fault of ours: a line is enough, whoever sends it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], DecodeError):
            record.exc_info = None
        return True


def setup_logs(service: str, id: str, level: str = "info", json: bool = False) -> None:
    """Set the process's logging up once, at the start of `main`. Every line carries service and id.

    Raises ValueError for a level that is none.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is none of debug, info, warning, error")
    logging.basicConfig(stream=sys.stderr, level=max(number, logging.WARNING), format="%(name)s: %(message)s")
    logging.getLogger("grpc._cython.cygrpc").addFilter(_NoTraceOfBadBytes())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.dict_tracebacks] if json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, id=id)
