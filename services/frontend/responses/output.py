"""The items of one response's output, made of what its speech says, and every step of making them told as an event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from services.frontend.parsers.events import Arguments, Call, Event, Text, Thought
from services.frontend.spoken import call_id

Tell = Callable[..., None]
"""Called with an event's type and its fields."""
_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}
"""What the part of an item's text is called."""


class Output:
    """One output. `close` ends it: without it the last item stays open."""

    def __init__(self, uid: str, tell: Tell, *, short_ids: bool, logprobs: bool) -> None:
        """`short_ids`: of calls, as Mistral's templates want them; `logprobs`: they are told beside text."""
        self.items: list[dict[str, Any]] = []
        self._uid = uid
        self._tell = tell
        self._short_ids = short_ids
        self._logprobs: list[Any] | None = [] if logprobs else None
        self._calls = 0
        self._said: list[str] = []
        """Of the item that is open."""
        self._open = ""
        """Its type."""

    def take(self, events: Sequence[Event], logprobs: Sequence[Any] = ()) -> None:
        """What a piece says; `logprobs` of its tokens go with its first text."""
        for event in events:
            match event:
                case Thought():
                    self._say("reasoning", event.text)
                case Text():
                    self._say("message", event.text, logprobs)
                    logprobs = ()
                case Call():
                    self._call(event.name)
                case Arguments():
                    self._arguments(event.text)

    def close(self, *, complete: bool) -> None:
        """The output has ended: the last item is complete, or was cut. An output of nothing is an empty message."""
        if not self.items:
            self._begin("message")
        self._end("completed" if complete else "incomplete")

    def _say(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> None:
        if self._open != kind:
            self._end("completed")
            self._begin(kind)
        self._said.append(text)
        if kind == "reasoning":
            self._tell("response.reasoning_text.delta", **self._part_at, delta=text)
            return
        if self._logprobs is not None:
            self._logprobs += logprobs
        self._tell("response.output_text.delta", **self._part_at, delta=text, logprobs=list(logprobs))

    def _call(self, name: str) -> None:
        self._end("completed")
        id = call_id(self._uid, self._calls, short=self._short_ids)
        self._calls += 1
        self._open_item("function_call", "fc", {"call_id": id, "name": name, "arguments": ""})

    def _arguments(self, text: str) -> None:
        self._said.append(text)
        self._tell("response.function_call_arguments.delta", **self._item_at, delta=text)

    def _begin(self, kind: str) -> None:
        if kind == "reasoning":
            self._open_item(kind, "rs", {"summary": [], "content": []})
        else:
            self._open_item(kind, "msg", {"role": "assistant", "content": []})
            self._logprobs = None if self._logprobs is None else []
        self._tell("response.content_part.added", **self._part_at, part=self._part(""))

    def _open_item(self, kind: str, prefix: str, members: dict[str, Any]) -> None:
        self._open, self._said = kind, []
        id = f"{prefix}_{self._uid}o{len(self.items)}"
        self.items.append({"id": id, "type": kind, "status": "in_progress", **members})
        self._tell("response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1])

    def _end(self, status: str) -> None:
        """Close the item that is open, if any."""
        kind, self._open = self._open, ""
        if not kind:
            return
        item, text = self.items[-1], "".join(self._said)
        if kind == "function_call":
            item["arguments"] = text
            self._tell("response.function_call_arguments.done", **self._item_at, name=item["name"], arguments=text)
        else:
            part = self._part(text)
            item["content"] = [part]
            more = {} if kind == "reasoning" else {"logprobs": part.get("logprobs", [])}
            self._tell(f"response.{_TEXT[kind]}.done", **self._part_at, text=text, **more)
            self._tell("response.content_part.done", **self._part_at, part=part)
        item["status"] = status
        self._tell("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _part(self, text: str) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs or ())}

    @property
    def _item_at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _part_at(self) -> dict[str, Any]:
        return self._item_at | {"content_index": 0}
