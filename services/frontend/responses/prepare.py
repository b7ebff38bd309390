"""From the body of a response to what can be started: for a client, or for a line of a batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.errors import BatonError, Reason
from services.frontend.asked import Api, Asked
from services.frontend.call import Ask
from services.frontend.errors import invalid
from services.frontend.frontend import Frontend
from services.frontend.lately import AWAY_S, LONG_AWAY_S
from services.frontend.respond import Prepared
from services.frontend.responses.body import Told, read_told
from services.frontend.responses.format import Keep, ResponseFormat
from services.frontend.responses.refer import earlier_of, read_references, stored
from services.frontend.turn import Turn


async def read(
    frontend: Frontend, body: bytes | bytearray, tenant: str, away_s: float = AWAY_S
) -> tuple[Asked, list[Ask], tuple[bytes, ...]]:
    """A tenant's checked body, with the conversation that it goes on with and the items that it refers to. `away_s`: of
    `Frontend.context_length`. Raises BatonError."""
    asked, asks = await frontend.read(body, Api.RESPONSES, tenant, away_s=away_s)
    earlier: tuple[bytes, ...] = ()
    if not asked.prompts:
        earlier = _conversation(frontend, tenant, asked.previous) if asked.previous else ()
        room = frontend.max_body_bytes - sum(map(len, earlier))
        items = await asyncio.to_thread(stored, frontend.responses, tenant, read_references(asked.told), room)
        asked, asks = await frontend.read(body, Api.RESPONSES, tenant, earlier_of(earlier, items), away_s=away_s)
    return asked, asks, earlier


def format_of(
    frontend: Frontend, uid: str, begun: float, asked: Asked, told: Told, keep: Keep | None = None
) -> ResponseFormat:
    """How it is answered; see `ResponseFormat`. `begun`: Unix seconds of the request's arrival."""
    options, defaults = asked.options, frontend.model.generation
    head = {
        "model": frontend.model.name,
        **told.head,
        "temperature": defaults.temperature if options.temperature is None else options.temperature,
        "top_p": defaults.top_p if options.top_p is None else options.top_p,
    }
    return ResponseFormat(
        uid,
        int(begun),
        head,
        voice=asked.voice,
        tokenizer=frontend.model.tokenizer,
        top=options.logprobs if told.logprobs else None,
        keep=keep,
    )


async def prepare_line(
    frontend: Frontend, body: bytes, uid: str, tenant: str, timeout_s: float, turns: Callable[[int], Turn]
) -> Prepared:
    """Of a batch. Its response is not kept: those that clients go on with would have to make room for it.

    Raises BatonError.
    """
    begun = time.time()
    asked, asks, _ = await read(frontend, body, tenant, LONG_AWAY_S)
    told = read_told(asked.told)
    if told.background:
        raise invalid("'background' has no place in a batch.", "background")
    told.head["store"] = False
    call = frontend.call(uid, asks, asked.options, begun, timeout_s, turns)
    format = format_of(frontend, uid, begun, asked, told)
    return Prepared(call, format, asked.options.stream, include_usage=True)


def _conversation(frontend: Frontend, tenant: str, id: str) -> tuple[bytes, ...]:
    param = "previous_response_id"
    try:
        kept = frontend.responses.get(id, tenant)
    except BatonError:
        text = f"Previous response with id '{id[:80]}' not found."
        raise BatonError(Reason.PREVIOUS_RESPONSE_NOT_FOUND, text, param=param) from None
    if kept.status not in ("completed", "incomplete"):
        raise invalid(f"The response '{kept.id}' is {kept.status}: nothing can go on with it.", param)
    if sum(map(len, kept.conversation)) > frontend.max_body_bytes:
        text = f"The conversation is larger than {frontend.max_body_bytes} bytes."
        raise BatonError(Reason.REQUEST_TOO_LARGE, text, param=param)
    return kept.conversation
