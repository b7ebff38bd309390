"""A model's weights, read from safetensors or GGUF, cast, fused and packed for the forward pass.

The identity of weights, which names their KV, is `baton.model.identity.weights_identity`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.torch import gguf
from baton.engine.torch.config import ModelConfig
from baton.engine.torch.linear import Linear
from baton.errors import BatonError, Reason


@dataclass
class LayerWeights:
    """One decoder layer. `qkv` gives queries, keys and values side by side; `gate_up` the gate, then the up half.

    `qk_norm` [heads + kv_heads, head_dim] scales normalised queries and keys, where the family has it.
    """

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrix products in the order that they run."""
        return (self.qkv, self.out, self.gate_up, self.down)


@dataclass
class Weights:
    """All of a model. `embedding` is [vocab, hidden]; `head` has a packed copy of it when they are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Linear


def load_weights(
    path: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Weights:
    """Read the weights at `path` (safetensors directory or .gguf), each tensor cast to `dtype`, on `device`.

    Raises BatonError(INVALID_REQUEST): a tensor is missing, unknown or of another shape than the config says.
    """
    path = Path(path)
    source = gguf.tensors(path, config.heads, config.kv_heads) if path.is_file() else _safetensors(path)
    # Cast one by one: the model never exists twice.
    bag = _Bag({name: tensor.to(device=device, dtype=dtype) for name, tensor in source})
    hidden, rows = config.hidden, (config.heads + 2 * config.kv_heads) * config.head_dim
    embedding = bag.take("model.embed_tokens.weight", (config.vocab, hidden))
    layers = []
    for index in range(config.layers):
        name = f"model.layers.{index}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        qkv = [f"{attention}.{p}_proj" for p in "qkv"]
        bias = bag.join([f"{p}.bias" for p in qkv], (rows,)) if config.qkv_bias else None
        gate_up = [f"{mlp}.{p}_proj.weight" for p in ("gate", "up")]
        layers.append(
            LayerWeights(
                input_norm=bag.take(f"{name}.input_layernorm.weight", (hidden,)),
                qkv=Linear(bag.join([f"{p}.weight" for p in qkv], (rows, hidden)), bias),
                qk_norm=_qk_norm(bag, attention, config) if config.qk_norm else None,
                out=Linear(bag.take(f"{attention}.o_proj.weight", (hidden, config.heads * config.head_dim))),
                post_norm=bag.take(f"{name}.post_attention_layernorm.weight", (hidden,)),
                gate_up=Linear(bag.join(gate_up, (2 * config.intermediate, hidden))),
                down=Linear(bag.take(f"{mlp}.down_proj.weight", (hidden, config.intermediate))),
            )
        )
    norm = bag.take("model.norm.weight", (hidden,))
    if config.tie_embeddings:
        bag.drop("lm_head.weight")  # some files carry the tied copy
        head = embedding
    else:
        head = bag.take("lm_head.weight", (config.vocab, hidden))
    bag.refuse_rest()
    return Weights(embedding, layers, norm, Linear(head))


def _qk_norm(bag: _Bag, attention: str, config: ModelConfig) -> Tensor:
    shape = (config.head_dim,)
    query = bag.take(f"{attention}.q_norm.weight", shape).expand(config.heads, -1)
    key = bag.take(f"{attention}.k_norm.weight", shape).expand(config.kv_heads, -1)
    return torch.cat((query, key))


def _safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise BatonError(Reason.INVALID_REQUEST, f"{path.name} has no .safetensors files", param="model")
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise BatonError(Reason.INVALID_REQUEST, f"{shard.name} cannot be read: {error}", param="model") from error


class _Bag:
    """Tensors by name, each taken once."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.join([name], shape)

    def join(self, names: list[str], shape: tuple[int, ...]) -> Tensor:
        """The named tensors, one below the other, together of `shape`."""
        missing = [name for name in names if name not in self._tensors]
        if missing:
            raise BatonError(Reason.INVALID_REQUEST, f"the model's files have no tensor {missing[0]}", param="model")
        parts = [self._tensors.pop(name) for name in names]
        found = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if found != shape:
            message = f"{' + '.join(names)} has shape {found}, the config says {shape}"
            raise BatonError(Reason.INVALID_REQUEST, message, param="model")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def drop(self, name: str) -> None:
        self._tensors.pop(name, None)

    def refuse_rest(self) -> None:
        """A tensor that nobody took would have changed the result."""
        rest = sorted(name for name in self._tensors if not name.endswith("rotary_emb.inv_freq"))
        if rest:
            message = f"{len(rest)} tensors are unknown to the torch engine, {rest[0]} among them"
            raise BatonError(Reason.INVALID_REQUEST, message, param="model")
