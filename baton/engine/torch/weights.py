"""A model's weights, from safetensors or GGUF, fused for fewer and larger products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.torch.config import ModelConfig
from baton.engine.torch.gguf import read_gguf_tensors
from baton.engine.torch.linear import Linear
from baton.errors import BatonError, Reason

_PARTS_OF_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass
class LayerWeights:
    """One decoder layer. `qkv` gives [(heads + 2 kv_heads) * head_dim], `gate_up` [2 * intermediate] from [hidden].

    `qk_norm` is [heads + kv_heads, head_dim]: the norm of each query head, then of each key head.
    """

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass
class Weights:
    """`embedding` is [vocab, hidden]; a tied `head` is the same numbers in the layout of a product."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: Linear


def load_weights(path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Weights:
    """Read every tensor, convert it to `dtype` and fuse. Raises BatonError(INVALID_REQUEST) naming what is missing or
    has another shape than the config says."""
    # Converted one by one: the whole model never exists twice.
    tensors = {name: tensor.to(device=device, dtype=dtype) for name, tensor in _read(path, config)}
    take = _Taker(tensors, path.name)
    h, d, kv = config.hidden, config.head_dim, config.kv_heads * config.head_dim
    q = config.heads * d
    embedding = take("model.embed_tokens.weight", config.vocab, h)
    layers = []
    for i in range(config.layers):
        at = f"model.layers.{i}."
        sizes = dict(zip(_PARTS_OF_QKV, (q, kv, kv), strict=True))
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        layers.append(
            LayerWeights(
                input_norm=take(f"{at}input_layernorm.weight", h),
                qkv=Linear(
                    torch.cat([take(f"{attention}{p}.weight", n, h) for p, n in sizes.items()]),
                    torch.cat([take(f"{attention}{p}.bias", n) for p, n in sizes.items()]) if config.qkv_bias else None,
                ),
                qk_norm=_qk_norm(take, attention, config) if config.qk_norm else None,
                out=Linear(take(f"{attention}o_proj.weight", h, q)),
                post_norm=take(f"{at}post_attention_layernorm.weight", h),
                gate_up=Linear(
                    torch.cat([take(f"{mlp}{p}.weight", config.intermediate, h) for p in ("gate_proj", "up_proj")])
                ),
                down=Linear(take(f"{mlp}down_proj.weight", h, config.intermediate)),
            )
        )
    head = embedding if config.tie_embeddings else take("lm_head.weight", config.vocab, h)
    return Weights(embedding, layers, take("model.norm.weight", h), Linear(head))


def _qk_norm(take: _Taker, attention: str, config: ModelConfig) -> torch.Tensor:
    query, key = (take(f"{attention}{part}_norm.weight", config.head_dim) for part in "qk")
    return torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])


def _read(path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    if path.is_file():
        yield from read_gguf_tensors(path, config.heads, config.kv_heads)
        return
    from safetensors import safe_open

    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise BatonError(Reason.INVALID_REQUEST, f"{path.name} has no .safetensors files")
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


class _Taker:
    """Hands out tensors once, so that the unfused ones are freed as the fused ones are made."""

    def __init__(self, tensors: dict[str, torch.Tensor], where: str) -> None:
        self._tensors = tensors
        self._where = where

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise BatonError(Reason.INVALID_REQUEST, f"{self._where} lacks the tensor {name}")
        if tensor.shape != shape:
            raise BatonError(
                Reason.INVALID_REQUEST, f"{self._where}: {name} is {list(tensor.shape)}, the config says {list(shape)}"
            )
        return tensor
