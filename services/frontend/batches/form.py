"""A `multipart/form-data` upload: its file goes to disk as it comes, the other fields are small."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from baton.errors import BatonError, Reason
from services.frontend.batches.files import Upload
from services.frontend.errors import invalid

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
MAX_NAME = 255
FLUSH_BYTES = 1 << 20


@dataclass
class Form:
    """What came: small fields by name, and the name that the file had."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


def boundary_of(headers: Mapping[str, str]) -> bytes:
    """The boundary of the form. Raises BatonError(UNSUPPORTED_MEDIA_TYPE)."""
    kind, options = parse_options_header(headers.get("content-type"))
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if kind != b"multipart/form-data" or encoding not in ("", "identity"):
        raise BatonError(Reason.UNSUPPORTED_MEDIA_TYPE, "A file is uploaded as multipart/form-data, uncompressed.")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 256:
        raise invalid("The form's boundary is missing.")
    return boundary


async def read_form(boundary: bytes, parts: AsyncIterator[bytes], upload: Upload) -> Form:
    """Read it all; the part `file` goes to `upload`. Raises BatonError naming what is wrong with it."""
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        async for part in parts:
            # The parser works through what it is given at once: not more of it than may hold up the loop.
            for start in range(0, len(part), FLUSH_BYTES):
                parser.write(part[start : start + FLUSH_BYTES])
                if len(reader.file) >= FLUSH_BYTES:
                    await upload.write(reader.take())
        parser.finalize()
    except FormParserError as error:
        raise invalid(f"The form cannot be read: {error}") from error
    if not reader.ended:
        raise invalid("The form ends too early.")
    await upload.write(reader.take())
    if reader.form.filename is None:
        raise invalid("The form has no file.", "file")
    return reader.form


class _Reader:
    """Takes the parser's callbacks."""

    def __init__(self) -> None:
        self.form = Form()
        self.file = bytearray()
        self.ended = False
        self._parts = 0
        self._name = ""
        self._is_file = False
        self._header = (bytearray(), bytearray())
        self._value = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._data,
            "on_part_end": self._end_part,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_end": self._end,
        }

    def take(self) -> bytes:
        """The file's bytes so far."""
        taken, self.file = bytes(self.file), bytearray()
        return taken

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise invalid(f"The form has more than {MAX_PARTS} fields.")
        self._name, self._is_file, self._value = "", False, bytearray()

    def _end_header(self) -> None:
        name, value = bytes(self._header[0]).lower(), bytes(self._header[1])
        self._header = (bytearray(), bytearray())
        if name != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.form.filename is not None:
                raise invalid("The form has more than one file.", "file")
            filename = options.get(b"filename", b"").decode("utf-8", "replace").strip()
            self.form.filename = filename[:MAX_NAME] or "file.jsonl"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.file += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise invalid(f"'{self._name[:80]}' has more than {MAX_FIELD_BYTES} bytes.", self._name[:80] or None)

    def _end_part(self) -> None:
        if not self._is_file:
            self.form.fields[self._name[:80]] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.ended = True
