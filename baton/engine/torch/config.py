"""What a model's files say of its shape, for the families that the torch engine computes: Llama, Qwen2, Qwen3.

Anything that would change the numbers and is not computed here is refused by name: a wrong answer is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from baton.engine.torch.gguf import read_tensor
from baton.engine.torch.rope import RopeScaling
from baton.errors import BatonError, Reason
from baton.model.errors import ModelError
from baton.model.files import ModelFiles, open_model
from baton.model.generation import load_generation

_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_GGUF_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. `family` is llama, qwen2 or qwen3; `rope_scaling` None is plain RoPE.

    `eos_token_ids` are those of config.json and generation_config.json together, or of the GGUF.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    max_context: int
    eos_token_ids: tuple[int, ...]

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections add a bias."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised, head by head, before RoPE."""
        return self.family == "qwen3"


def load_config(path: str | Path) -> ModelConfig:
    """Read the shape of the model at `path`, a safetensors directory or a .gguf file.

    Raises BatonError(INVALID_REQUEST): no model there, or one that this engine does not compute, and why.
    """
    try:
        files = open_model(path)
        config = _from_gguf(files) if files.gguf is not None else _from_directory(files)
    except ModelError as error:
        raise BatonError(Reason.INVALID_REQUEST, str(error), param="model") from error
    except KeyError as error:
        _refuse(f"{Path(path).name} does not say {error.args[0]}")
    except (TypeError, ValueError) as error:
        _refuse(f"{Path(path).name} has an unusable config: {error}")
    sizes = (config.layers, config.hidden, config.kv_heads, config.head_dim, config.intermediate, config.vocab)
    if min(sizes) < 1 or config.heads % config.kv_heads or config.head_dim % 2:
        _refuse(f"{Path(path).name} has impossible sizes: {config}")
    return config


def _refuse(message: str) -> NoReturn:
    raise BatonError(Reason.INVALID_REQUEST, message, param="model")


def _from_directory(files: ModelFiles) -> ModelConfig:
    raw = files.config
    name = (raw.get("architectures") or ["an unnamed architecture"])[0]
    family = _FAMILIES.get(name)
    if family is None:
        _refuse(f"{name} is not computed by the torch engine (it does {', '.join(_FAMILIES)})")
    _refuse_what_differs(raw, family)
    heads = int(raw["num_attention_heads"])
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return ModelConfig(
        family=family,
        layers=int(raw["num_hidden_layers"]),
        hidden=int(raw["hidden_size"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        intermediate=int(raw["intermediate_size"]),
        vocab=int(raw["vocab_size"]),
        rms_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rope_scaling=_scaling(rope),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_context=files.context_length,
        eos_token_ids=tuple(sorted({*_ids(raw.get("eos_token_id")), *load_generation(files).eos_ids})),
    )


def _refuse_what_differs(raw: Mapping[str, Any], family: str) -> None:
    kinds = raw.get("layer_types") or []
    # Qwen files carry a window's width even where it is off; `use_sliding_window` decides.
    windowed = raw.get("use_sliding_window", family == "llama") and raw.get("sliding_window")
    if windowed or any("sliding" in str(kind) for kind in kinds):
        _refuse("sliding-window attention is not computed by the torch engine")
    if any(kind != "full_attention" for kind in kinds):
        _refuse(f"layers of kind {sorted(set(kinds))} are not computed by the torch engine")
    if raw.get("quantization_config"):
        _refuse("quantised safetensors are not read by the torch engine: use a GGUF, or plain weights")
    if raw.get("hidden_act", "silu") != "silu":
        _refuse(f"activation {raw['hidden_act']} is not computed by the torch engine")
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        _refuse("attention_bias and mlp_bias are not computed by the torch engine")


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        _refuse("a partial rotary embedding is not computed by the torch engine")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind,
            float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_context=int(rope["original_max_position_embeddings"]),
        )
    _refuse(f"RoPE scaling {kind!r} is not computed by the torch engine (default, linear and llama3 are)")


def _ids(value: Any) -> list[int]:
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]


def _from_gguf(files: ModelFiles) -> ModelConfig:
    assert files.gguf is not None
    meta = files.gguf.metadata
    family = str(meta.get("general.architecture", "an unnamed architecture"))
    if family not in _GGUF_FAMILIES:
        _refuse(f"GGUF architecture {family} is not computed by the torch engine (it does {', '.join(_GGUF_FAMILIES)})")

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{family}.{key}", default)
        if value is None:
            raise KeyError(f"{family}.{key}")
        if isinstance(value, list):
            _refuse(f"{family}.{key} differs from layer to layer: not computed by the torch engine")
        return value

    if get("expert_count", 0):
        _refuse("mixture-of-experts models are not computed by the torch engine")
    if get("attention.sliding_window", 0):
        _refuse("sliding-window attention is not computed by the torch engine")
    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if {int(get(key, head_dim)) for key in ("attention.value_length", "rope.dimension_count")} != {head_dim}:
        _refuse("values or rotary embeddings narrower than the head are not computed by the torch engine")
    shapes = {t.name: t.shape for t in files.gguf.tensors}
    return ModelConfig(
        family=family,
        layers=int(get("block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate=int(get("feed_forward_length")),
        vocab=shapes["token_embd.weight"][1],
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=float(get("rope.freq_base", 10_000.0)),
        rope_scaling=_gguf_scaling(files, meta, family),
        tie_embeddings="output.weight" not in shapes,
        max_context=files.context_length,
        eos_token_ids=load_generation(files).eos_ids,
    )


def _gguf_scaling(files: ModelFiles, meta: Mapping[str, Any], family: str) -> RopeScaling | None:
    assert files.gguf is not None
    for tensor in files.gguf.tensors:
        if tensor.name == "rope_freqs.weight":  # llama3 scaling, already worked out by the converter
            factors = read_tensor(files.path, files.gguf, tensor)
            return RopeScaling("factors", 1.0, factors=tuple(float(f) for f in factors))
    kind = meta.get(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return _scaling({"rope_type": kind, "factor": meta.get(f"{family}.rope.scaling.factor", 1.0)})
