"""Traces as requests: Mooncake's JSON lines (512-token hash chain), Azure's CSV (lengths only), and many copies of one.

Mooncake: https://github.com/kvcache-ai/Mooncake (2024). Azure: https://github.com/Azure/AzurePublicDataset (2023).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import random
import struct
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from baton.kv.keys import KEY_BYTES

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Request:
    """Arrives at second `at` with `prompt` tokens, in blocks of `Trace.block` named by `keys`; answers `output`."""

    at: float
    prompt: int
    output: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. `block` is the tokens that a key covers."""

    name: str
    block: int
    requests: list[Request]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at - self.requests[0].at

    @property
    def prompt_tok_s(self) -> float:
        """Prompt tokens that arrive in a second."""
        return sum(request.prompt for request in self.requests) / self.seconds

    def digest(self) -> str:
        """Names these arrivals: what comes when, how long, sharing what."""
        found = hashlib.blake2b(str(self.block).encode(), digest_size=8)
        for request in self.requests:
            found.update(struct.pack("<dqq", request.at, request.prompt, request.output))
            found.update(b"".join(request.keys))
        return found.hexdigest()

    def faster(self, factor: float) -> Trace:
        """The same requests, arriving `factor` times as fast."""
        return Trace(self.name, self.block, [Request(r.at / factor, r.prompt, r.output, r.keys) for r in self.requests])

    def window(self, seconds: float) -> Trace:
        """What arrives within the first `seconds`."""
        return Trace(self.name, self.block, [r for r in self.requests if r.at < seconds])

    def copies(self, count: int, seed: int = 0, seconds: float = math.inf) -> Trace:
        """`count` of this trace side by side: as many users, none of whom shares a key with another's copy. Of that
        what arrives within the first `seconds`.

        Each copy but the first begins at a random place and wraps around, so that bursts do not meet.
        """
        rng = random.Random(seed)
        length = self.requests[-1].at + 1e-3
        found = []
        for number in range(count):
            shift, mark = (rng.uniform(0.0, length) if number else 0.0), number.to_bytes(2, "little")
            found += [
                Request(at, r.prompt, r.output, tuple(key[: -len(mark)] + mark for key in r.keys))
                for r in self.requests
                if (at := (r.at + shift) % length) < seconds
            ]
        return Trace(self.name, self.block, sorted(found, key=lambda r: r.at))


def mooncake(path: Path) -> Trace:
    """A Mooncake trace. Keys after a prompt's last full block name its partial block: they count like the others."""
    found = []
    for line in path.read_text().splitlines():
        said = json.loads(line)
        keys = tuple(number.to_bytes(KEY_BYTES, "little") for number in said["hash_ids"])
        found.append(
            Request(said["timestamp"] / 1e3, max(1, said["input_length"]), max(1, said["output_length"]), keys)
        )
    return Trace(path.stem.removesuffix("_trace"), MOONCAKE_BLOCK, found)


def azure(path: Path) -> Trace:
    """An Azure trace. It tells no content, so no two requests share a key and none is worth indexing."""
    found: list[Request] = []
    first = 0.0
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            first = first or at
            found.append(
                Request(at - first, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])), ())
            )
    return Trace(path.stem, MOONCAKE_BLOCK, found)


def shipped(folder: Path) -> dict[str, Trace]:
    """Every trace in `folder`, by name."""
    found = [mooncake(path) for path in sorted(folder.glob("*.jsonl"))]
    found += [azure(path) for path in sorted(folder.glob("*.csv"))]
    return {trace.name: trace for trace in found}


def traces_folder() -> Path | None:
    """Where the traces are: $BATON_TRACES, else `shared/traces` in the checkout or a folder above it."""
    named = os.environ.get("BATON_TRACES")
    if named:
        return Path(named)
    candidates = (above / "shared" / "traces" for above in Path(__file__).resolve().parents)
    return next((folder for folder in candidates if folder.is_dir()), None)
