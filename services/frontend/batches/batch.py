"""What is known of a batch, on disk and to clients."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from services.frontend.batches.lines import LineError
from services.frontend.batches.usage import NOTHING, Usage

WINDOW_S = 24 * 3600


class Status(StrEnum):
    """OpenAI's."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """Whether it is the last one."""
        return self in (Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED)


class Batch(msgspec.Struct):
    """One batch. `at` has the unix second of each status that it came to; `ends` is how it will end once its results
    are files, which then stay for `output_seconds` (None, of older ones: until they are deleted); `total`, `done` and
    `failed` are lines; `usage` is of those that are done; `tenant` is whose it is ("" of older ones), as its lines and
    its results files are."""

    id: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    created: int
    status: Status = Status.VALIDATING
    at: dict[str, int] = msgspec.field(default_factory=dict)
    ends: Status = Status.COMPLETED
    errors: list[LineError] = msgspec.field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    done: int = 0
    failed: int = 0
    output_seconds: int | None = None
    model: str | None = None
    usage: Usage = NOTHING
    tenant: str = ""

    @property
    def expires(self) -> int:
        """Unix seconds."""
        return self.created + WINDOW_S

    def shown(self) -> dict[str, Any]:
        """As OpenAI's batch object."""
        at = self.at
        errors = {"object": "list", "data": [error.shown() for error in self.errors]} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created,
            "in_progress_at": at.get("in_progress"),
            "expires_at": self.expires,
            "finalizing_at": at.get("finalizing"),
            "completed_at": at.get("completed"),
            "failed_at": at.get("failed"),
            "expired_at": at.get("expired"),
            "cancelling_at": at.get("cancelling"),
            "cancelled_at": at.get("cancelled"),
            "request_counts": {"total": self.total, "completed": self.done, "failed": self.failed},
            "usage": self.usage.shown(),
            "metadata": self.metadata,
        }
