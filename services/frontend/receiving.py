"""What the endpoints beside chat and completions share: how a request comes in, and its body is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request

from baton.errors import BatonError, Reason
from services.frontend.asked import Api, Asked, Unread
from services.frontend.frontend import Frontend
from services.frontend.gate import Pass
from services.frontend.lately import AWAY_S

Receive = Callable[[Request, Frontend, str], Awaitable[tuple[Pass, bytearray]]]
"""Lets a request in and takes its body; what it returns is to be left."""


async def read_as(
    frontend: Frontend, body: bytes | bytearray, api: Api, away_s: float = AWAY_S, *, tenant: str = ""
) -> Asked:
    """The checked body, a tenant's where prompts are made of it. Raises BatonError: not right, or not in time."""
    try:
        async with asyncio.timeout(frontend.request_timeout_s):
            return await frontend.bodies.read(Unread(body, api, frontend.context_length(away_s), tenant=tenant))
    except TimeoutError:
        raise BatonError(Reason.DEADLINE_EXCEEDED, "The request took longer than it may to be read.") from None
