"""What a stream of `/v1/messages` must be: a list of what is wrong with one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.named_events import named_events

REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
_DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


@dataclass
class MessageStream:
    """A stream as it was read. `faults`: empty when it is as the API says."""

    faults: list[str] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    """As it began."""
    blocks: list[dict[str, Any]] = field(default_factory=list)
    """Each with the `said` of its deltas."""
    reason: str = ""
    sequence: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What its text blocks say."""
        return "".join(block["said"] for block in self.blocks if block["type"] == "text")


def read_message_stream(raw: bytes) -> MessageStream:
    """Read a whole response body."""
    stream = MessageStream()
    wrong = stream.faults.append
    events = [event for event in named_events(raw, wrong) if event["type"] != "ping"]
    kinds = [event["type"] for event in events]
    if kinds[:1] != ["message_start"] or kinds[-2:] != ["message_delta", "message_stop"]:
        wrong("it does not begin with message_start and end with message_delta and message_stop")
        return stream
    stream.message = message = events[0]["message"]
    if message["content"] or message["stop_reason"] is not None or message["role"] != "assistant":
        wrong("a message that is not at its beginning")
    is_open = False
    for event in events[1:-2]:
        is_open = _take(stream, event, is_open)
    if is_open:
        wrong("a block is open at the end")
    delta, stream.usage = events[-2]["delta"], events[-2]["usage"]
    stream.reason, stream.sequence = delta["stop_reason"], delta["stop_sequence"]
    if stream.reason not in REASONS:
        wrong(f"it stops for {stream.reason}")
    if (stream.sequence is not None) != (stream.reason == "stop_sequence"):
        wrong("a stop sequence that does not go with the reason")
    _check_usage(stream)
    return stream


def _take(stream: MessageStream, event: dict[str, Any], is_open: bool) -> bool:
    """One event between the beginning and the end; whether a block is open after it."""
    wrong, kind = stream.faults.append, event["type"]
    if kind == "content_block_start":
        block = event["content_block"]
        if is_open:
            wrong("a block within another")
        if event["index"] != len(stream.blocks):
            wrong(f"a block at {event['index']}")
        if block.get("text") or block.get("thinking") or block.get("input"):
            wrong("a block that is not at its beginning")
        stream.blocks.append(block | {"said": "", "signed": 0})
        return True
    if kind not in ("content_block_delta", "content_block_stop"):
        wrong(f"{kind} in the middle")
        return is_open
    if not is_open or event["index"] != len(stream.blocks) - 1:
        wrong(f"{kind} of a block that is not open")
        return is_open
    block = stream.blocks[-1]
    if kind == "content_block_delta":
        _add(stream, block, event["delta"])
        return True
    if block["type"] == "thinking" and block["signed"] != 1:
        wrong("a thought that is not signed once")
    return False


def _add(stream: MessageStream, block: dict[str, Any], delta: dict[str, Any]) -> None:
    member = _DELTAS[block["type"]].get(delta["type"])
    if member is None:
        stream.faults.append(f"{delta['type']} in a {block['type']}")
    elif member == "signature":
        block["signed"] += 1
    elif block["signed"]:
        stream.faults.append("a thought goes on after its signature")
    else:
        block["said"] += delta[member]


def _check_usage(stream: MessageStream) -> None:
    wrong, began, ended = stream.faults.append, stream.message["usage"], stream.usage
    if began["input_tokens"] != ended["input_tokens"] + ended["cache_read_input_tokens"]:
        wrong("the input's tokens change")
    if began["output_tokens"] or ended["output_tokens"] < ended["output_tokens_details"]["thinking_tokens"]:
        wrong("the output's tokens do not add up")
    for block in stream.blocks:
        if block["type"] == "tool_use" and stream.reason != "max_tokens":
            try:
                json.loads(block["said"])
            except ValueError:
                wrong(f"an input that is not JSON: {block['said'][:80]!r}")
