"""Tensors into safetensors files of bounded size: no more than one file's worth is ever in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 << 30
"""Where one file ends and the next begins."""
INDEX = "model.safetensors.index.json"


def save_tensors(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    wrote: Callable[[int], None],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write model.safetensors, or numbered parts of it and their index. `wrote` hears the values of each tensor."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal held, size
        part = directory / f"part-{len(shards)}"
        save_file(held, part, metadata={"format": "pt"})
        part.chmod(0o644)  # as the other files: a container may run as somebody else
        shards.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        cast = tensor.to(dtype).contiguous()
        if held and size + cast.nbytes > shard_bytes:
            flush()
        held[name] = cast
        size += cast.nbytes
        total += cast.nbytes
        wrote(cast.numel())
    flush()

    if len(shards) == 1:
        (directory / "part-0").rename(directory / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (directory / f"part-{number}").rename(directory / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
