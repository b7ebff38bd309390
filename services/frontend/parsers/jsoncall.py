"""One call as a JSON object, `{"name": ..., "arguments": {...}}`, read character by character as it comes.

The arguments are passed on as they are written, from the first character on once the name is known. Their key may also
be `parameters`, the keys may come in any order, and others are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum, auto

from services.frontend.parsers.events import Arguments, Call, Event

_BLANK = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class _At(Enum):
    START = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()
    DONE = auto()
    FAILED = auto()


class JsonCall:
    """The reader of one object; `functions` are the names that count."""

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = functions
        self._at = _At.START
        self._key = ""
        self._text = ""
        """The key or value that is being read, where it is not passed on at once."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._told = False
        self._held = ""
        """Arguments that came before the name."""
        self._has_arguments = False
        self._bare = False
        """Whether it is the arguments alone."""
        self._out: list[Event] = []
        self.raw = ""
        """All of it until the name is told: text after all, when that never comes."""

    @classmethod
    def of_arguments(cls) -> JsonCall:
        """The reader of arguments alone, of a call that has been told."""
        call = cls(())
        call._at, call._key, call._told, call._bare = _At.VALUE, "arguments", True, True
        return call

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        """Whether it is no call."""
        return self._at is _At.FAILED

    @property
    def told(self) -> bool:
        """Whether the call has been told."""
        return self._told

    def feed(self, text: str) -> tuple[list[Event], int]:
        """Events, and how many characters were taken: all, unless it is done or failed."""
        self._out = []
        taken = 0
        for char in text:
            if self.done or self.failed:
                break
            taken += 1
            if not self._told:
                self.raw += char
            self._step(char)
        return self._out, taken

    def _step(self, char: str) -> None:
        match self._at:
            case _At.IN_KEY:
                self._string(char)
                if not self._in_string:
                    self._key, self._at = _decoded(self._text), _At.COLON
            case _At.IN_VALUE:
                self._value(char)
            case _ if char in _BLANK:
                pass
            case _At.VALUE:
                self._begin(char)
            case _At.START:
                self._at = _At.KEY if char == "{" else _At.FAILED
            case _At.KEY if char == '"':
                self._text, self._in_string, self._at = char, True, _At.IN_KEY
            case _At.COLON if char == ":":
                self._at = _At.VALUE
            case _At.AFTER if char == ",":
                self._at = _At.KEY
            case _At.KEY | _At.AFTER if char == "}":
                self._close()
            case _:
                self._at = _At.FAILED

    def _begin(self, char: str) -> None:
        self._text, self._depth, self._in_string, self._at = "", 0, False, _At.IN_VALUE
        if char in ",}]":
            self._at = _At.FAILED
            return
        self._value(char)

    def _value(self, char: str) -> None:
        """One character of a value, the one that ends a bare one included."""
        if self._in_string:
            self._string(char, keep=False)
            self._keep(char)
            if not self._in_string and not self._depth:
                self._end_value()
        elif char == '"':
            self._in_string = True
            self._keep(char)
        elif char in "{[":
            self._depth += 1
            self._keep(char)
        elif char in "}]" and self._depth:
            self._depth -= 1
            self._keep(char)
            if not self._depth:
                self._end_value()
        elif not self._depth and (char in ",}" or char in _BLANK):
            self._end_value()
            if char not in _BLANK and self._at is _At.AFTER:
                self._step(char)
        else:
            self._keep(char)

    def _keep(self, char: str) -> None:
        if self._key in _ARGUMENTS and self._streams(char):
            self._pass(char)
        elif self._key == "name" or self._key in _ARGUMENTS:
            self._text += char

    def _streams(self, char: str) -> bool:
        """Whether a character of the arguments is passed on: those of an object are, at once."""
        return self._depth > 0 or (not self._text and char in "}]")

    def _pass(self, text: str) -> None:
        self._has_arguments = True
        if self._told:
            self._out.append(Arguments(text))
        else:
            self._held += text

    def _string(self, char: str, keep: bool = True) -> None:
        """One character of a string."""
        if keep:
            self._text += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _end_value(self) -> None:
        self._at = _At.AFTER
        if self._key == "name" and not self._told:
            name = _decoded(self._text)
            if name not in self._functions:
                self._at = _At.FAILED
                return
            self._told = True
            self._out += [Call(name), Arguments(self._held)]
        elif self._key in _ARGUMENTS and self._text and self._text != "null":
            # Some write the arguments as a string of JSON: that string is what clients expect.
            given = _decoded(self._text) if self._text.startswith('"') else self._text
            if given.strip():
                self._pass(given)
        if self._bare:
            self._close()

    def _close(self) -> None:
        self._at = _At.DONE if self._told else _At.FAILED
        if self._told and not self._has_arguments:
            self._out.append(Arguments("{}"))


def _decoded(text: str) -> str:
    """The string that JSON text stands for; "" when it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    # An escaped half of a surrogate pair is no character: no answer could be encoded with it.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
