"""What a stream of chat or completion chunks must be, whoever reads it: a list of what is wrong with one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"
FINISHES = {"stop", "length", "tool_calls", "content_filter"}
_HEAD = ("id", "object", "created", "model")


@dataclass
class Stream:
    """A stream as it was read. `faults`: empty when it is as the API says."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    """Entries of chat's `content`, or token strings of completions."""
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    faults: list[str] = field(default_factory=list)


def read_stream(raw: bytes, *, chat: bool, outputs: int = 1, usage: bool = False, continuous: bool = False) -> Stream:
    """Read a whole response body. `usage`: it was asked for; `continuous`: in every chunk."""
    stream = Stream()
    wrong = stream.faults.append
    chunks = [chunk for data in _events(raw, wrong) if (chunk := _parse(data, wrong)) is not None]
    for name in _HEAD:
        if len({json.dumps(chunk.get(name)) for chunk in chunks}) > 1:
            wrong(f"{name} changes")
    if any(chunk.get("object") != ("chat.completion.chunk" if chat else "text_completion") for chunk in chunks):
        wrong("wrong object")
    roles: Counter[int] = Counter()
    for place, chunk in enumerate(chunks):
        last = place == len(chunks) - 1
        _check_usage(stream, chunk, last=last, wanted=usage, continuous=continuous)
        for choice in chunk["choices"]:
            _take(stream, choice, roles, chat=chat, outputs=outputs)
    for index in range(outputs):
        if index not in stream.finishes:
            wrong(f"output {index} does not finish")
        if chat and roles[index] != 1:
            wrong(f"output {index} has {roles[index]} roles")
    if usage and stream.usage is None:
        wrong("no usage")
    return stream


def _events(raw: bytes, wrong: Any) -> list[str]:
    """The data of each event but the last, which must be [DONE]."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        wrong(f"not UTF-8: {error.reason}")
        text = raw.decode(errors="replace")
    if not text.endswith("\n\n"):
        wrong("the last event is not complete")
    events = text.removesuffix("\n\n").split("\n\n")
    data = []
    for event in events:
        if not event.startswith("data: ") or "\n" in event:
            wrong(f"not an event: {event[:60]!r}")
        data.append(event.removeprefix("data: "))
    if data[-1] != DONE:
        wrong("it does not end with [DONE]")
    if data.count(DONE) > 1:
        wrong("[DONE] more than once")
    return [one for one in data if one != DONE]


def _parse(data: str, wrong: Any) -> dict[str, Any] | None:
    try:
        chunk = json.loads(data)
    except ValueError:
        wrong(f"not JSON: {data[:60]!r}")
        return None
    if not isinstance(chunk, dict) or "error" in chunk or not isinstance(chunk.get("choices"), list):
        wrong(f"not a chunk: {data[:200]}")
        return None
    return chunk


def _check_usage(stream: Stream, chunk: dict[str, Any], *, last: bool, wanted: bool, continuous: bool) -> None:
    wrong, usage = stream.faults.append, chunk.get("usage")
    if not chunk["choices"] and not (wanted and last and usage):
        wrong("a chunk without choices that is not the last one with the usage")
    if wanted and last and chunk["choices"]:
        wrong("the usage chunk has choices, or is not the last")
    if wanted and "usage" not in chunk:
        wrong("a chunk without usage, not even null")
    if not wanted and "usage" in chunk:
        wrong("usage that nobody asked for")
    if usage is None:
        return
    if not last and not continuous:
        wrong("usage before the end")
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        wrong("the usage does not add up")
    if not 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]:
        wrong("more cached tokens than there are")
    stream.usage = usage


def _take(stream: Stream, choice: dict[str, Any], roles: Counter[int], *, chat: bool, outputs: int) -> None:
    wrong, index = stream.faults.append, choice["index"]
    delta = choice.get("delta", {}) if chat else choice
    text = delta.get("content" if chat else "text") or ""
    if index not in range(outputs):
        wrong(f"output {index} of {outputs}")
    if "role" in delta:
        roles[index] += 1
        if delta["role"] != "assistant":
            wrong(f"role {delta['role']}")
    if chat and not roles[index]:
        wrong(f"output {index} begins without its role")
    if "\ufffd" in text:
        wrong(f"U+FFFD in output {index}")
    if index in stream.finishes and (text or choice.get("logprobs")):
        wrong(f"output {index} goes on after its end")
    if choice.get("finish_reason") is not None:
        if index in stream.finishes:
            wrong(f"output {index} finishes again")
        if choice["finish_reason"] not in FINISHES:
            wrong(f"finish_reason {choice['finish_reason']}")
        stream.finishes[index] = choice["finish_reason"]
    stream.texts[index] = stream.texts.get(index, "") + text
    if logprobs := choice.get("logprobs"):
        stream.logprobs.setdefault(index, []).extend(logprobs["content" if chat else "tokens"])
    stream.token_ids.setdefault(index, []).extend(choice.get("token_ids", ()))
