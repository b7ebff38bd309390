"""Messages from vLLM's processes to ours: msgpack, each with its length in front (LE u32). Only descriptors go back."""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


class Rank(_Message):
    """A tensor-parallel rank is there, with its KV cache. `shape` is one block's of one layer, `order` its axes."""

    rank: int
    pid: int
    layers: int
    shape: list[int]
    order: str
    dtype: str
    block_bytes: int


class Scheduler(_Message):
    """The scheduler's side is there: it publishes the state of its steps."""


class Sealed(_Message):
    """Prompt blocks `first`... of a job, `count` of them, are in their slots (this rank's part of them)."""

    rank: int
    job: int
    first: int
    count: int


class Ended(_Message):
    """This rank touches nothing of that job any more."""

    rank: int
    job: int


class Broken(_Message):
    """No token can be drawn for that job, and why."""

    job: int
    message: str


FromVllm = Rank | Scheduler | Sealed | Ended | Broken

decoder = msgspec.msgpack.Decoder(FromVllm)
_encoder = msgspec.msgpack.Encoder()


def frame(message: FromVllm) -> bytes:
    """With its length in front."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
