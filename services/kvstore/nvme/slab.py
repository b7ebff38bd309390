"""How a slab lies on the disk: a superblock, then slots of one size, each a header and a payload, all aligned to 4096.

    superblock  magic, version, era, block bytes, tokens, fingerprint, sum       says the shape of everything behind it
    header      magic, state, era, generation, key, length, expiry, payload sum, tenant, sum
    payload     the block's bytes, padded

A slot counts only when it is SEALED, its header's own sum is right, and its era is the superblock's: clearing all of it
is a new era, one write. A slot is written as FILLING with its payload, then its header again as SEALED: a process that
is killed in between leaves FILLING, which is dropped. A payload's sum is over its identity and its bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from baton.kv.handle import checksum
from baton.kv.keys import KEY_BYTES
from services.kvstore.aligned import ALIGN, aligned
from services.kvstore.tier import BlockShape, Facts

VERSION = 1
EMPTY, FILLING, SEALED = 0, 1, 2
MAX_TENANT_BYTES = 255
_SUPER_MAGIC = b"BATONSLB"
_SLOT_MAGIC = b"BATONKVB"
_SUPER = struct.Struct("<8sIQQIB")
_HEADER = struct.Struct(f"<8sIQQ{KEY_BYTES}sQdQB")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True)
class Superblock:
    """The shape of a slab, and which clearing of it is the current one."""

    era: int
    shape: BlockShape


@dataclass(frozen=True)
class Header:
    """One slot's. `digest` is the payload's sum under key, era and generation."""

    state: int
    era: int
    generation: int
    key: bytes
    length: int
    facts: Facts
    digest: int


def slot_bytes(shape: BlockShape) -> int:
    """What one block takes."""
    return ALIGN + aligned(shape.block_bytes)


def slot_offset(number: int, shape: BlockShape) -> int:
    """Where slot `number` begins."""
    return ALIGN + number * slot_bytes(shape)


def write_superblock(superblock: Superblock, into: memoryview) -> None:
    """Encode into the first ALIGN bytes. Raises ValueError when the fingerprint has more than 255 bytes."""
    name = superblock.shape.fingerprint.encode()
    if len(name) > 255:
        raise ValueError("a fingerprint has at most 255 bytes")
    shape = superblock.shape
    fixed = _SUPER.pack(_SUPER_MAGIC, VERSION, superblock.era, shape.block_bytes, shape.tokens, len(name))
    _seal(fixed + name, into)


def is_slab(start: bytes) -> bool:
    """Whether a file may be a store's, by its first ALIGN bytes: any version, torn, or never written to."""
    return start.startswith(_SUPER_MAGIC) or not any(start)


class NoSuperblockError(Exception):
    """Nothing behind this can be served. `outcome` is the word for counters: "empty", "version" or "torn"."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def read_superblock(data: memoryview | bytes) -> Superblock:
    """Raises NoSuperblockError for anything that is not a whole superblock of this version."""
    magic, version, era, block_bytes, tokens, length = _SUPER.unpack_from(data)
    end = _SUPER.size + length
    if not any(data[:ALIGN]):
        raise NoSuperblockError("empty", "nothing was written yet")
    if magic == _SUPER_MAGIC and version != VERSION:
        raise NoSuperblockError("version", f"it is of version {version}, this store's is {VERSION}")
    if magic != _SUPER_MAGIC or not block_bytes or not _sealed(data, end):
        raise NoSuperblockError("torn", "its superblock is not whole")
    return Superblock(era, BlockShape(bytes(data[_SUPER.size : end]).decode(errors="replace"), block_bytes, tokens))


def write_header(header: Header, into: memoryview) -> None:
    """Encode into the first ALIGN bytes. The tenant has at most MAX_TENANT_BYTES."""
    tenant = header.facts.tenant.encode()
    fixed = _HEADER.pack(
        _SLOT_MAGIC,
        header.state,
        header.era,
        header.generation,
        header.key,
        header.length,
        header.facts.expires,
        header.digest,
        len(tenant),
    )
    _seal(fixed + tenant, into)


def read_header(data: memoryview) -> Header | None:
    """None for anything that is not a whole header: nothing was ever written there, or something else was."""
    magic, state, era, generation, key, length, expires, digest, name = _HEADER.unpack_from(data)
    end = _HEADER.size + name
    if magic != _SLOT_MAGIC or not _sealed(data, end):
        return None
    tenant = bytes(data[_HEADER.size : end]).decode(errors="replace")
    return Header(state, era, generation, key, length, Facts(tenant, expires), digest)


def payload_sum(key: bytes, era: int, generation: int, payload: memoryview) -> int:
    """The sum under which a payload lies on the disk."""
    return checksum(key, era, generation, payload)


def _seal(fields: bytes, into: memoryview) -> None:
    end = len(fields)
    into[:end] = fields
    into[end : end + _SUM.size] = _SUM.pack(xxhash.xxh3_64_intdigest(fields))
    into[end + _SUM.size : ALIGN] = bytes(ALIGN - end - _SUM.size)


def _sealed(data: memoryview | bytes, end: int) -> bool:
    (digest,) = _SUM.unpack_from(data, end)
    return bool(digest == xxhash.xxh3_64_intdigest(data[:end]))
