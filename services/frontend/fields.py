"""Typed reading of a JSON object's fields: each refusal names the field at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.errors import invalid


class Fields:
    """The fields of one request. A null counts as absent. Raises BatonError naming the field.

    A number that is whole is an integer, however it is written (5.0), as JSON has only one kind of number.
    """

    def __init__(self, raw: Mapping[str, Any], vocab_size: int) -> None:
        self.raw = raw
        self.vocab_size = vocab_size

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise invalid(f"'{name}' must be a number.", name)
        if not low <= value <= high:
            raise invalid(f"'{name}' must be at least {low:g} and at most {high:g}.", name)
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value % 1 == 0)):
            raise invalid(f"'{name}' must be an integer.", name)
        if not low <= value <= high:
            raise invalid(f"'{name}' must be at least {low} and at most {high}.", name)
        return int(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"'{name}' must be true or false.", name)
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(f"'{name}' must be an object.", name)
        return value or {}

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise invalid(f"'{name}' must be a list of token ids.", name)
        return tuple(self.token_id(item, name) for item in value)

    def token_id(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.vocab_size:
            raise invalid(f"'{name}' has a token id that is not between 0 and {self.vocab_size - 1}.", name)
        return value

    def refuse(self, name: str, harmless: Sequence[Any] = (), why: str = "is not supported by this server yet") -> None:
        """Refuse a field that would change the answer, unless its value says what is done anyway."""
        value = self.raw.get(name)
        if value is not None and value not in ([], {}, "", False) and value not in harmless:
            raise invalid(f"'{name}' {why}.", name)
