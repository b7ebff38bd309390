"""What the reference is made of: endpoints and fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["works", "ignored", "refused"]
Json = dict[str, Any]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, COMPLETIONS)
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
HUGE = (1 << 63) - 1


@dataclass(frozen=True)
class Endpoint:
    """One route. `key`: asks for an API key when there are any."""

    method: str
    path: str
    note: str
    key: bool = True


@dataclass(frozen=True)
class Field:
    """One field of a request's body. `schema`: what values are taken (JSON Schema), of a field that works."""

    name: str
    status: Status
    note: str
    schema: Json | None = None
    where: tuple[str, ...] = BOTH
    required: bool = False
