"""Messages between a worker process and its engine process: msgpack, each with its length in front (LE u32)."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
MAX_BYTES = 256 * 2**20


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# ---- worker to engine


class Reserve(_Message):
    """Take a reservation; answered by Reserved or Refused under `job`. `request` is an encoded baton Request."""

    job: int
    request: bytes
    keys: list[bytes]
    tail_key: bytes
    decode_room: bool


class Commit(_Message):
    """The first `tokens` prompt tokens have their KV in place, verified."""

    job: int
    tokens: int


class Swap(_Message):
    """A late read may still write to these prompt blocks: quarantine their slots, take others. Answered by Swapped."""

    job: int
    call: int
    blocks: list[int]


class Settle(_Message):
    """Late reads into these slots are over."""

    slots: list[int]


class Prefill(_Message):
    """Compute the prompt and announce it: Sealed..., then Prefilled, or Failed."""

    job: int


class Generate(_Message):
    """Start generating; `first` are (choice, token id) drawn elsewhere, `done` the choices that these already ended."""

    job: int
    first: list[tuple[int, int]]
    done: list[int]


class StopPrefill(_Message):
    """Nobody listens to this job's prefill any more; its blocks stay."""

    job: int


class Release(_Message):
    """Give a job's blocks back and forget it."""

    job: int


class Hold(_Message):
    """Keep the sealed blocks of these keys, as many as are here, until Unhold. Answered by Held."""

    call: int
    keys: list[bytes]


class Unhold(_Message):
    """Let go of what Held answered under `call`."""

    call: int


class Embed(_Message):
    """Compute an input for the mean of its last hidden states; answered by Embedded or Failed under `job`."""

    job: int
    ids: list[int]
    deadline: float
    batch: bool = False


class PauseBatch(_Message):
    """For `seconds` from now, nothing of the batch lane is computed."""

    seconds: float


class Check(_Message):
    """Answered by Answer(findings)."""

    call: int


class Clear(_Message):
    """Answered by Answer(dropped)."""

    call: int


# ---- engine to worker


class Started(_Message):
    """The engine serves: an encoded EngineSpec."""

    spec: bytes


class StartFailed(_Message):
    """It does not: why."""

    message: str


class Reserved(_Message):
    """Slots of the prompt's blocks, and how many tokens are prefix hits."""

    job: int
    slots: list[int]
    hit_tokens: int


class Refused(_Message):
    """A reason by name."""

    job: int
    reason: str
    message: str
    param: str


class Swapped(_Message):
    """The job's prompt slots now: fewer, still a prefix, when the pool had no replacement."""

    call: int
    slots: list[int]


class Block(_Message):
    """A sealed block, as a handle without owner."""

    slot: int
    key: bytes
    generation: int
    tokens: int
    checksum: int


class Held(_Message):
    """To Hold: those of its keys that are here, in order."""

    call: int
    blocks: list[Block]


class Sealed(_Message):
    """Prompt blocks of `job` from `first_block` on."""

    job: int
    first_block: int
    blocks: list[Block]


Logprob = tuple[int, float, list[tuple[int, float]]]


class Prefilled(_Message):
    """The prompt is computed: (choice, token, finish, logprob) each; prompt logprobs when asked for."""

    job: int
    first: list[tuple[int, int, str, Logprob | None]]
    prompt_logprobs: list[Logprob | None]


class Failed(_Message):
    """A prefill job ends by a reason."""

    job: int
    reason: str
    message: str


class Embedded(_Message):
    """The mean, as little-endian f32."""

    job: int
    vector: bytes


class Token(msgspec.Struct, array_like=True, frozen=True):
    """A step's outcome for one choice."""

    uid: str
    attempt: int
    choice: int
    offset: int
    ids: list[int]
    logprobs: list[Logprob]
    finish: str
    error: str
    message: str


class Step(_Message):
    """All token events of one step."""

    tokens: list[Token]


class CacheChange(_Message):
    """Keys that the prefix cache gained and lost, in order."""

    stored: list[bytes]
    removed: list[bytes]


class Answer(_Message):
    """To Check or Clear."""

    call: int
    findings: list[str]
    count: int


ToEngine = (
    Reserve
    | Commit
    | Swap
    | Settle
    | Prefill
    | StopPrefill
    | Generate
    | Release
    | Hold
    | Unhold
    | Embed
    | PauseBatch
    | Check
    | Clear
)
ToWorker = (
    Started
    | StartFailed
    | Reserved
    | Refused
    | Swapped
    | Held
    | Sealed
    | Prefilled
    | Failed
    | Embedded
    | Step
    | CacheChange
    | Answer
)

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
to_worker = msgspec.msgpack.Decoder(ToWorker)


def frame(message: Any) -> bytes:
    """Length and body. Raises ValueError when the body is over MAX_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_BYTES:
        raise ValueError(f"message of {len(body)} bytes is over {MAX_BYTES}")
    return LENGTH.pack(len(body)) + body
