"""The lines of a batch's input: each names a request. All of them are checked before the first one runs. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.frontend.batches.answer import EMBEDDINGS, ENDPOINTS

MAX_LINES = 50_000
MAX_INPUTS = 50_000
"""To be embedded, of all lines together; both limits are OpenAI's."""
MAX_LINE_BYTES = 1 << 20
"""Taking JSON apart holds the interpreter's lock; OpenAI's own limit is 200 MB for a file."""
MAX_ERRORS = 50
"""Of a file: the rest is not looked at."""
MAX_CUSTOM_ID = 512


class Line(msgspec.Struct):
    """One line, its body as it is written there."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with a file, as OpenAI's batch object tells it. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass
class Index:
    """Where the lines are: `starts[i]` and `sizes[i]` of request i, whose `custom_ids[i]` no other one has."""

    starts: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("L"))
    custom_ids: dict[str, int] = field(default_factory=dict)
    """To the number of the request."""

    def __len__(self) -> int:
        return len(self.starts)


class _Embeds(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(Line).decode
_embeds = msgspec.json.Decoder(_Embeds).decode
_listed = msgspec.json.Decoder(list[msgspec.Raw]).decode
_NAMES = ("custom_id", "method", "url", "body")


def read_line(raw: bytes, endpoint: str) -> Line:
    """A line of a batch for `endpoint`. Raises ValueError(code, message, param)."""
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError("line_too_long", f"A line may have {MAX_LINE_BYTES} bytes.", None)
    try:
        line = _decode(raw)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        text = str(error)
        param = next((name for name in _NAMES if f"`{name}`" in text or f"$.{name}`" in text), None)
        code = "missing_required_parameter" if "missing" in text else "invalid_value"
        raise ValueError(code, text, param) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("invalid_json_line", f"This line is not valid JSON: {error}", None) from error
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        raise ValueError("invalid_value", f"'custom_id' must have 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if line.method != "POST":
        raise ValueError("invalid_method", f"'method' must be POST, not {line.method[:20]!r}.", "method")
    if line.url not in ENDPOINTS:
        raise ValueError("invalid_url", f"'url' must be one of {', '.join(ENDPOINTS)}, not {line.url[:80]!r}.", "url")
    if line.url != endpoint:
        raise ValueError("mismatched_url", f"'url' must be the batch's endpoint, {endpoint}.", "url")
    if not bytes(line.body).lstrip().startswith(b"{"):
        raise ValueError("invalid_value", "'body' must be an object.", "body")
    return line


def _inputs(body: msgspec.Raw) -> int:
    """How many a body has to embed. One that is not right has one: it fails alone."""
    try:
        items = _listed(_embeds(body).input)
    except msgspec.MsgspecError:  # a text
        return 1
    # A list of numbers is one input, of token ids.
    return 1 if not items or bytes(items[0]).lstrip()[:1].isdigit() else len(items)


def check_lines(lines: Iterable[bytes], endpoint: str) -> tuple[Index, list[LineError]]:
    """Look at every line (with its end of line, as files give them). Nothing is to be run when there are errors."""
    index, errors, position, inputs = Index(), [], 0, 0
    for number, raw in enumerate(lines, 1):
        start, position = position, position + len(raw)
        if not raw.strip():
            continue
        if len(index) >= MAX_LINES:
            text = f"A batch may have {MAX_LINES} requests."
            errors.append(LineError("too_many_requests", text, number, "input_file_id"))
            break
        try:
            line = read_line(raw, endpoint)
        except ValueError as error:
            code, message, param = error.args
            errors.append(LineError(code, message, number, param))
            if code == "line_too_long":  # what follows is its rest
                break
        else:
            inputs += _inputs(line.body) if endpoint == EMBEDDINGS else 0
            if inputs > MAX_INPUTS:
                text = f"A batch may have {MAX_INPUTS} inputs to embed in all its requests."
                errors.append(LineError("too_many_inputs", text, number, "body.input"))
                break
            if line.custom_id in index.custom_ids:
                text = f"'custom_id' {line.custom_id[:80]!r} is that of another line."
                errors.append(LineError("duplicate_custom_id", text, number, "custom_id"))
            else:
                index.custom_ids[line.custom_id] = len(index)
                index.starts.append(start)
                index.sizes.append(len(raw))
        if len(errors) >= MAX_ERRORS:
            break
    if not index and not errors:
        errors.append(LineError("empty_file", "The file has no requests."))
    return index, errors
