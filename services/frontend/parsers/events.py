"""What parsers give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

Signature = tuple[str, dict[str, Any]]
"""A function's name, and the schema of its arguments."""


@dataclass(frozen=True, slots=True)
class Text:
    """Content."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins: of this function. Told once, with the whole name."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


Event = Text | Thought | Call | Arguments
TokenId = Callable[[str], int | None]
"""The id of an added token, None when the vocabulary has none of that text."""


class ToolParser(ABC):
    """Takes one output apart. What all its events say together does not depend on how the text was cut into pieces."""

    specials: ClassVar[tuple[str, ...]] = ()
    """Control tokens that it must see as text."""

    @abstractmethod
    def __init__(self, functions: Sequence[str]) -> None:
        """`functions` may be called."""

    @abstractmethod
    def push(self, text: str) -> list[Event]:
        """What the next piece of text makes certain."""

    @abstractmethod
    def end(self) -> list[Event]:
        """The output has ended: what was held back."""

    @classmethod
    @abstractmethod
    def grammar(cls, functions: Sequence[Signature], parallel: bool, token_id: TokenId) -> str:
        """Lark rules, `calls` the first, of an output that is nothing but calls in this format: one, or up to MAX_CALLS
        when `parallel`."""

    @classmethod
    @abstractmethod
    def write(cls, calls: Sequence[dict[str, Any]]) -> str:
        """Calls of an earlier answer, `{name, arguments}` each, as the model would have written them."""


MAX_CALLS = 16
"""Of one answer whose grammar allows more than one: a model in doubt would call for ever."""


def merged(events: Sequence[Event]) -> list[Event]:
    """The same with neighbours of one kind joined, and nothing empty."""
    out: list[Event] = []
    for event in events:
        if not isinstance(event, Call):
            if not event.text:
                continue
            if out and type(out[-1]) is type(event):
                last = out.pop()
                assert not isinstance(last, Call)
                event = type(event)(last.text + event.text)
        out.append(event)
    return out


def begun(buffer: str, mark: str) -> int:
    """The length of the longest suffix of `buffer` with which `mark` begins, all of `mark` excepted."""
    for size in range(min(len(buffer), len(mark) - 1), 0, -1):
        if mark.startswith(buffer[-size:]):
            return size
    return 0
