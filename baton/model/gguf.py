"""The header of a GGUF file: its metadata and where its tensors lie, without touching the tensor data.

Layout (version 2 and 3, little endian): magic, version, tensor count, key count, the key-value pairs, the tensor
table, padding, then the data. Torch-free and fast: a vocabulary of 50,000 tokens parses in well under a second.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from baton.model.errors import ModelError

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ITEMS = 1 << 27
_MAX_DEPTH = 4


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table. `offset` counts bytes from the start of the data; `kind` is the ggml type number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """What precedes the tensor data. `data_start` is the file offset of the first tensor."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_start: int


class _Cursor:
    """Reads values one after another out of a file; every short read is a ModelError."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    def take(self, count: int) -> bytes:
        if count > self._size:
            raise ModelError(f"GGUF header asks for {count} bytes of a file of {self._size}")
        data = self._file.read(count)
        if len(data) != count:
            raise ModelError("GGUF header ends in the middle of a value: the file is truncated")
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < _MAX_DEPTH:
            item, count = self.scalar("I"), self.scalar("Q")
            if count > _MAX_ITEMS:
                raise ModelError(f"GGUF array of {count} items is not believable")
            if item in _SCALARS:
                code = _SCALARS[item]
                raw = self.take(count * struct.calcsize("<" + code))
                return list(struct.unpack(f"<{count}{code}", raw))
            return [self.value(item, depth + 1) for _ in range(count)]
        raise ModelError(f"GGUF value type {kind} is unknown")

    def tensors(self, count: int) -> Iterator[TensorInfo]:
        for _ in range(count):
            name = self.string()
            dims = self.scalar("I")
            if dims > 8:
                raise ModelError(f"GGUF tensor {name!r} has {dims} dimensions")
            shape = tuple(self.scalar("Q") for _ in range(dims))
            yield TensorInfo(name, shape, self.scalar("I"), self.scalar("Q"))

    def tell(self) -> int:
        return self._file.tell()


def read_gguf(path: Path) -> GgufHeader:
    """Parse the header of the GGUF file at `path`. Raises ModelError (not a GGUF, truncated, unknown version)."""
    with path.open("rb") as file:
        cursor = _Cursor(file, path.stat().st_size)
        if cursor.take(4) != _MAGIC:
            raise ModelError(f"{path.name} is not a GGUF file")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ModelError(f"GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
        if tensor_count > _MAX_ITEMS or pair_count > _MAX_ITEMS:
            raise ModelError("GGUF header counts are not believable")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        tensors = tuple(cursor.tensors(tensor_count))
        alignment = int(metadata.get("general.alignment", 32)) or 32
        data_start = -(-cursor.tell() // alignment) * alignment
    return GgufHeader(metadata, tensors, data_start)
