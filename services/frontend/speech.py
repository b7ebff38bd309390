"""One chat output taken apart: a thought, then content and calls, in order."""

from __future__ import annotations

from dataclasses import dataclass

from services.frontend.parsers.choose import REASONING, TOOLS
from services.frontend.parsers.events import Call, Event, Text, ToolParser, merged
from services.frontend.parsers.reasoning import ReasoningParser


@dataclass(frozen=True)
class Voice:
    """How the outputs of one request are written. `tools` and `reasoning` name parsers, "" for none.

    `opened`: the prompt has opened a thought. `named`: one function was asked for by name, which is no decision of the
    model's and therefore ends with `stop`. `shown`: control tokens that the parsers must see, by id.
    """

    tools: str = ""
    functions: tuple[str, ...] = ()
    named: bool = False
    reasoning: str = ""
    opened: bool = False
    shown: tuple[tuple[int, str], ...] = ()


PLAIN = Voice()
"""All of it is content."""


class Speech:
    """The parsers of one output. What all its events say does not depend on how the text was cut into pieces."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._thoughts = ReasoningParser(REASONING[voice.reasoning], open=voice.opened) if voice.reasoning else None
        self._tools: ToolParser | None = TOOLS[voice.tools](voice.functions) if voice.tools else None
        self.calls = 0
        """Calls told so far."""
        self.thought_tokens = 0
        """Tokens of the thought, its marks included; of a piece with its end and more, by the share of characters."""
        self._unsure = 0
        self._answering = self._thoughts is None

    def push(self, text: str, tokens: int = 0) -> list[Event]:
        """What the next piece of text, of so many tokens, makes certain."""
        events: list[Event] = [Text(text)] if self._thoughts is None else self._thoughts.push(text)
        if not self._answering and self._thoughts is not None:
            self._count(self._thoughts, text, tokens, events)
        return self._counted([event for one in events for event in self._read(one)])

    def end(self) -> list[Event]:
        """The output has ended: what was held back."""
        events: list[Event] = [] if self._thoughts is None else self._thoughts.end()
        out = [event for one in events for event in self._read(one)]
        return self._counted([*out, *(self._tools.end() if self._tools is not None else [])])

    def finish_reason(self, reason: str) -> str:
        """How the output ended, as OpenAI says it."""
        return "tool_calls" if reason == "stop" and self.calls and not self._voice.named else reason

    def _read(self, event: Event) -> list[Event]:
        return self._tools.push(event.text) if self._tools is not None and isinstance(event, Text) else [event]

    def _count(self, thoughts: ReasoningParser, text: str, tokens: int, events: list[Event]) -> None:
        """Which of a piece's tokens belong to the thought."""
        self._unsure += tokens
        if thoughts.thinking is None:
            return
        if thoughts.thought:
            said = sum(len(event.text) for event in events if isinstance(event, Text))
            self.thought_tokens += self._unsure - round(tokens * said / max(1, len(text)))
        self._unsure = 0
        self._answering = not thoughts.thinking

    def _counted(self, events: list[Event]) -> list[Event]:
        self.calls += sum(isinstance(event, Call) for event in events)
        return merged(events)
