"""Which weights these are: a digest that two processes compute alone and agree on, without torch.

Reading gigabytes at each start would cost minutes, so the digest covers the tensor table (names, shapes, types,
places), the file sizes, what config decides the meaning of the weights, and `SAMPLE_BYTES` at the start and the end of
every tensor's data. Two trainings of one architecture differ in every tensor; a copy under another name does not.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from baton.model.errors import ModelError
from baton.model.files import ModelFiles, open_model
from baton.model.origin import original

SAMPLE_BYTES = 1024
_MAX_SAFETENSORS_HEADER = 100 << 20
# Says how or by whom the files were written, not what the weights are.
_CONFIG_NOISE = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "_attn_implementation"}
)


class _Digest:
    """Length-prefixed BLAKE2b: no two runs of parts collide by running into each other."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(b"baton-weights-v1", digest_size=16)

    def add(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)

    def add_json(self, value: Any) -> None:
        self.add(
            json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr).encode("utf-8", "surrogateescape")
        )

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def weights_identity(model: str | Path | ModelFiles) -> str:
    """32 hex digits naming the weights at that path. Raises ModelError when there are none or the files are torn."""
    files = model if isinstance(model, ModelFiles) else open_model(model)
    digest = _Digest()
    if files.gguf is not None:
        _add_gguf(digest, files)
    else:
        _add_safetensors(digest, files)
        return original(files.path, "weights", digest.hexdigest())
    return digest.hexdigest()


def _add_gguf(digest: _Digest, files: ModelFiles) -> None:
    assert files.gguf is not None
    header = files.gguf
    # The tokenizer and the names people gave the file have digests of their own, or none.
    architecture = str(header.metadata.get("general.architecture", ""))
    digest.add_json({k: v for k, v in header.metadata.items() if k.startswith(f"{architecture}.")} | {"": architecture})
    digest.add_json([(t.name, t.shape, t.kind, t.offset) for t in header.tensors])
    size = files.path.stat().st_size
    starts = sorted(header.data_start + t.offset for t in header.tensors)
    digest.add_json(size - header.data_start)
    _add_samples(digest, files.path, zip(starts, [*starts[1:], size], strict=True))


def _add_safetensors(digest: _Digest, files: ModelFiles) -> None:
    shards = sorted(files.path.glob("*.safetensors"))
    if not shards:
        raise ModelError(f"{files.path} has no .safetensors files")
    digest.add_json({k: v for k, v in files.config.items() if k not in _CONFIG_NOISE})
    for shard in shards:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= min(size - 8, _MAX_SAFETENSORS_HEADER):
                raise ModelError(f"{shard.name} is not a safetensors file")
            try:
                table = json.loads(file.read(length))
            except ValueError as error:
                raise ModelError(f"{shard.name} has a torn header: {error}") from error
        table.pop("__metadata__", None)
        digest.add_json(table)
        digest.add_json(size - length)
        data = 8 + length
        try:
            spans = sorted((data + t["data_offsets"][0], data + t["data_offsets"][1]) for t in table.values())
        except (TypeError, KeyError, IndexError) as error:
            raise ModelError(f"{shard.name} has a torn header: {error!r}") from error
        _add_samples(digest, shard, spans)


def _add_samples(digest: _Digest, path: Path, spans: Iterable[tuple[int, int]]) -> None:
    with path.open("rb", buffering=0) as file:
        for start, end in spans:
            file.seek(start)
            digest.add(file.read(min(SAMPLE_BYTES, end - start)))
            file.seek(max(start, end - SAMPLE_BYTES))
            digest.add(file.read(min(SAMPLE_BYTES, end - start)))
