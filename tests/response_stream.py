"""What a stream of `/v1/responses` must be: a list of what is wrong with one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.named_events import named_events

LAST = ("response.completed", "response.incomplete", "response.failed")
_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass
class ResponseStream:
    """A stream as it was read. `faults`: empty when it is as the API says."""

    faults: list[str] = field(default_factory=list)
    response: dict[str, Any] = field(default_factory=dict)
    """As the last event has it."""
    items: list[dict[str, Any]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)


def read_response_stream(raw: bytes, first: str = "in_progress") -> ResponseStream:
    """Read a whole response body. `first`: the status that the response is created with."""
    stream = ResponseStream()
    wrong = stream.faults.append
    events = named_events(raw, wrong)
    stream.events = [event["type"] for event in events]
    if [event.get("sequence_number") for event in events] != list(range(len(events))):
        wrong("the sequence numbers are not 0, 1, 2...")
    if stream.events[:2] != ["response.created", "response.in_progress"] or len(events) < 3:
        wrong("it does not begin with created and in_progress")
        return stream
    for event, status in zip(events[:2], (first, "in_progress"), strict=True):
        if event["response"]["status"] != status or event["response"]["output"] or event["response"]["usage"]:
            wrong(f"{event['type']} is of a response that is not at its beginning")
    reader = _Reader(stream)
    for event in events[2:-1]:
        reader.take(event)
    _check_end(stream, events, reader)
    return stream


def _check_end(stream: ResponseStream, events: list[dict[str, Any]], reader: _Reader) -> None:
    wrong, last = stream.faults.append, events[-1]
    if last["type"] not in LAST:
        wrong(f"it ends with {last['type']}")
        return
    stream.response = response = last["response"]
    failed = last["type"] == "response.failed"
    if reader.open and not failed:
        wrong("an item is open at the end")
    if not failed and response["output"] != stream.items:
        wrong("the output is not the items that were done")
    if response["status"] != last["type"].removeprefix("response."):
        wrong("the status is not the event's")
    if len({json.dumps(one["response"][name]) for one in (*events[:2], last) for name in ("id",)}) > 1:
        wrong("the id changes")
    cut = [item["status"] for item in stream.items] != ["completed"] * len(stream.items)
    if cut != (response["status"] == "incomplete") and not failed:
        wrong("incomplete items in a complete response, or the other way")
    if (response["incomplete_details"] is None) == (response["status"] == "incomplete"):
        wrong("incomplete_details do not go with the status")
    if (response["error"] is not None) != failed:
        wrong("an error of a response that has not failed, or none")
    usage = response["usage"]
    if not failed:
        if usage["total_tokens"] != usage["input_tokens"] + usage["output_tokens"]:
            wrong("the usage does not add up")
        if not 0 <= usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]:
            wrong("more cached tokens than there are")
        if not 0 <= usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]:
            wrong("more reasoning tokens than there are")


class _Reader:
    """The items between the beginning and the end: one after another, each in its order."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream
        self.open: dict[str, Any] | None = None
        self._said = ""
        self._step = ""
        """The last event of the open item, the deltas aside."""

    def take(self, event: dict[str, Any]) -> None:
        wrong, kind = self._stream.faults.append, event["type"].removeprefix("response.")
        if kind == "output_item.added":
            self._begin(event)
            return
        if self.open is None:
            wrong(f"{event['type']} without an item")
            return
        if event.get("output_index") != len(self._stream.items):
            wrong(f"{event['type']} of output {event.get('output_index')}")
        if kind == "output_item.done":
            self._end(event["item"])
            return
        if event.get("item_id") != self.open["id"]:
            wrong(f"{event['type']} of another item")
        name = _TEXT.get(self.open["type"], "function_call_arguments")
        if self.open["type"] != "function_call" and event.get("content_index") != 0:
            wrong(f"{event['type']} of another part")
        if kind == f"{name}.delta":
            self._after(event, "content_part.added" if name != "function_call_arguments" else "output_item.added")
            self._said += event["delta"]
            if name == "output_text":
                self._stream.text += event["delta"]
                self._stream.logprobs += event["logprobs"]
        elif kind == f"{name}.done":
            self._after(event, "content_part.added" if name != "function_call_arguments" else "output_item.added")
            self._step = kind
            if event["arguments" if name == "function_call_arguments" else "text"] != self._said:
                wrong(f"{event['type']} does not say what the deltas said")
        elif kind == "content_part.added" and name != "function_call_arguments":
            self._after(event, "output_item.added")
            self._step = kind
            if event["part"]["type"] != name or event["part"]["text"]:
                wrong("a part that does not begin empty")
        elif kind == "content_part.done" and name != "function_call_arguments":
            self._after(event, f"{name}.done")
            self._step = kind
            if event["part"]["type"] != name or event["part"]["text"] != self._said:
                wrong("a part that does not say what the deltas said")
        else:
            wrong(f"{event['type']} in a {self.open['type']}")

    def _begin(self, event: dict[str, Any]) -> None:
        wrong, item = self._stream.faults.append, event["item"]
        if self.open is not None:
            wrong("an item within another")
        if event["output_index"] != len(self._stream.items):
            wrong(f"an item at {event['output_index']}")
        if item["status"] != "in_progress" or item.get("content") or item.get("arguments"):
            wrong("an item that is not at its beginning")
        if item["id"] in [known["id"] for known in self._stream.items]:
            wrong("an id that is taken")
        self.open, self._said, self._step = item, "", "output_item.added"

    def _end(self, item: dict[str, Any]) -> None:
        wrong, began = self._stream.faults.append, self.open
        assert began is not None
        wanted = "function_call_arguments.done" if item["type"] == "function_call" else "content_part.done"
        if self._step != wanted:
            wrong(f"an item that ends after {self._step}")
        same = ("id", "type") + (("call_id", "name") if item["type"] == "function_call" else ())
        if any(item.get(name) != began.get(name) for name in same):
            wrong("an item that is not what it was")
        text = item["arguments"] if item["type"] == "function_call" else "".join(p["text"] for p in item["content"])
        if text != self._said:
            wrong("an item that does not say what the deltas said")
        if item["status"] not in ("completed", "incomplete"):
            wrong(f"an item that ends {item['status']}")
        self._stream.items.append(item)
        self.open = None

    def _after(self, event: dict[str, Any], step: str) -> None:
        if self._step != step:
            self._stream.faults.append(f"{event['type']} after {self._step}")
