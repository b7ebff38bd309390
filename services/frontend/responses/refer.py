"""`item_reference`: an input names an item of a response that is kept here instead of sending it again.

The id of an item that was made or named here says which response it came with (`msg_<uid>o0` and `fco_<uid>i2` are of
`resp_<uid>`), so nothing but the responses themselves is kept, and an item is known for as long as its response is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from baton.errors import BatonError, Reason
from services.frontend.errors import invalid
from services.frontend.responses.store import ResponseStore, listed, with_ids

Item = dict[str, Any]
_OWNER = re.compile(r"[a-z]+_([0-9a-f]{24})[io][0-9]+")


class Earlier(msgspec.Struct):
    """What a body needs of responses that are kept: the items of the conversation that it goes on with, and by their
    ids those that it refers to."""

    before: list[Item] = msgspec.field(default_factory=list)
    items: dict[str, Item] = msgspec.field(default_factory=dict)


_encode = msgspec.json.Encoder().encode
read_earlier = msgspec.json.Decoder(Earlier).decode
read_references = msgspec.json.Decoder(list[str]).decode


def is_reference(item: Any) -> bool:
    """Whether an item of an input refers to another one: OpenAI lets the type be left out."""
    return isinstance(item, Mapping) and (item.get("type") == "item_reference" or set(item) == {"id"})


def references(value: Any) -> list[str]:
    """The ids that an `input` refers to. Raises BatonError(INVALID_REQUEST)."""
    found = []
    for i, item in enumerate(value if isinstance(value, list) else ()):
        if is_reference(item):
            id = item.get("id")
            if not isinstance(id, str) or not id:
                raise invalid(f"'input[{i}].id' must be the id of an item.", f"input[{i}].id")
            found.append(id)
    return found


def check_once(value: Any, before: Iterable[Item], items: Sequence[Item]) -> None:
    """Raises BatonError(INVALID_REQUEST): `value`, which is read as `items`, refers to what is in the conversation
    already. Neither its pages nor its size would have an end."""
    often = Counter(item.get("id") for item in (*before, *items))
    for i, item in enumerate(value if isinstance(value, list) else ()):
        if is_reference(item) and often[item["id"]] > 1:
            raise invalid(f"'input[{i}]': the item '{item['id'][:80]}' is in the conversation already.", f"input[{i}]")


def stored(store: ResponseStore, tenant: str, ids: Iterable[str], most: int) -> dict[str, msgspec.Raw]:
    """The tenant's items of those ids, as JSON. Work for a thread.

    Raises BatonError: NOT_FOUND, REQUEST_TOO_LARGE when they have more than `most` bytes together.
    """
    responses: dict[str, dict[str, msgspec.Raw]] = {}
    found: dict[str, msgspec.Raw] = {}
    for id in ids:
        owner = _OWNER.fullmatch(id)
        uid = owner[1] if owner else ""
        if uid not in responses:
            responses[uid] = _items_of(store, tenant, uid)
        item = responses[uid].get(id)
        if item is None:
            text = f"Item with id '{id[:80]}' not found: items are kept with a response whose 'store' is true."
            raise BatonError(Reason.NOT_FOUND, text, param="input")
        found[id] = item
    if sum(map(len, found.values())) > most:
        raise BatonError(Reason.REQUEST_TOO_LARGE, "The items referred to are too large together.", param="input")
    return found


def earlier_of(parts: tuple[bytes, ...], items: Mapping[str, msgspec.Raw]) -> bytes:
    """An Earlier as JSON, of parts of a conversation and of items."""
    return _encode({"before": msgspec.Raw(listed(parts)), "items": items})


def _items_of(store: ResponseStore, tenant: str, uid: str) -> dict[str, msgspec.Raw]:
    try:
        kept = store.get(f"resp_{uid}", tenant)
    except BatonError:
        return {}
    return dict(with_ids(listed((kept.items, kept.output))))
