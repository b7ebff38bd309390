"""Messages between vLLM's processes and ours: msgpack, each with its length in front (LE u32)."""

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


class Output(_Message):
    """A block of a job's output, which `key` names, is in the job's spare slot (this rank's part of it)."""

    rank: int
    job: int
    key: bytes


class Ended(_Message):
    """This rank touches nothing of that job any more."""

    rank: int
    job: int


class Broken(_Message):
    """No token can be drawn for that job, and why."""

    job: int
    message: str


class Spare(_Message):
    """To vLLM's scheduler: the job's next block of output goes to this slot, when it is full."""

    job: int
    slot: int


FromVllm = Rank | Scheduler | Sealed | Output | Ended | Broken

decoder = msgspec.msgpack.Decoder(FromVllm)
spares = msgspec.msgpack.Decoder(Spare)
_encoder = msgspec.msgpack.Encoder()


def frame(message: FromVllm | Spare) -> bytes:
    """With its length in front."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
