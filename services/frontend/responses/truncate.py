"""`truncation: auto`: a conversation that is too long loses its oldest turns, as few as make the rest fit.

A turn begins with a message of the user's and goes on to the next one, so that no call is parted from its result.
System messages and the last turn stay: when even they do not fit, the request is refused as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from baton.errors import BatonError, Reason
from services.frontend.schema import ChatBody

T = TypeVar("T")
SHARE = 8
"""Of the context, that the answer gets where it is not said how long it may be: a conversation that has to be cut would
else leave room for one token."""


def truncated(read: Callable[[ChatBody, int], T], body: ChatBody, limit: int) -> T:
    """What `read` makes of as much of a body as fits `limit` tokens together with the answer that it asks for.

    Bisects over the turns: `read` is called a logarithm of their number. Raises BatonError as `read` does.
    """
    wanted = body.options.max_tokens
    whole = limit if wanted is None else limit - wanted + 1
    cut = limit - limit // SHARE if wanted is None else whole
    fewest, most = 0, len(turns(body.messages)) - 1
    found: T | None = None
    refusal: BatonError | None = None
    while fewest <= most:
        dropped = 0 if found is None and refusal is None else (fewest + most) // 2
        try:
            found = read(replace(body, messages=without(body.messages, dropped)), cut if dropped else whole)
        except BatonError as error:
            if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED:
                raise
            refusal, fewest = error, dropped + 1
        else:
            most = dropped - 1
    if found is not None:
        return found
    return read(body, limit)


def turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Where each turn begins; the first one with the first message that is not the system's."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), None)
    return sorted({first, *starts}) if first is not None else [0]


def without(messages: Sequence[Mapping[str, Any]], dropped: int) -> tuple[Mapping[str, Any], ...]:
    """The messages without that many of the oldest turns; the system's stay."""
    start = turns(messages)[dropped] if dropped else 0
    return tuple(message for i, message in enumerate(messages) if i >= start or message["role"] == "system")
