"""config.json and generation_config.json of a model whose shape is known."""

from __future__ import annotations

from typing import Any

import torch

from baton.engine.torch.config import ModelConfig
from baton.engine.torch.rope import RopeScaling, inverse_frequencies
from baton.model.errors import ModelError
from baton.model.generation import GenerationConfig

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0)
"""Published `factor`s of llama3 scaling (3.1 has 8, 3.2 has 32); the other three numbers are the same in all."""
_LLAMA3_CONTEXT = 8192


def config_json(config: ModelConfig, dtype: str, bos_id: int | None) -> dict[str, Any]:
    """config.json for weights of `dtype` (float32 or bfloat16).

    Raises ModelError when the model's RoPE scaling cannot be said in a config.
    """
    rope = _rope(config)
    return {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "bos_token_id": bos_id,
        "eos_token_id": _one_or_many(config.eos_token_ids),
        # A family's own switches, each off: what a GGUF of it cannot carry.
        **({"attention_bias": False} if config.family != "qwen2" else {}),
        **({"mlp_bias": False} if config.family == "llama" else {"use_sliding_window": False}),
    }


def generation_json(generation: GenerationConfig, bos_id: int | None) -> dict[str, Any]:
    """generation_config.json: a GGUF says where an output ends, and no sampling defaults."""
    return {"bos_token_id": bos_id, "eos_token_id": _one_or_many(generation.eos_ids)}


def _rope(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    plain = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain | {"rope_type": "linear", "factor": scaling.factor}
    # A GGUF carries llama3 scaling worked out, one factor a frequency: look for the numbers that give those.
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, scaling)
    for factor in _LLAMA3_FACTORS:
        guess = RopeScaling("llama3", factor, 1.0, 4.0, _LLAMA3_CONTEXT)
        guessed = inverse_frequencies(config.head_dim, config.rope_theta, guess)
        if torch.allclose(frequencies, guessed, rtol=1e-5, atol=0):
            return plain | {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": guess.low_freq_factor,
                "high_freq_factor": guess.high_freq_factor,
                "original_max_position_embeddings": guess.original_context,
            }
    raise ModelError("this GGUF's rope_freqs are of no RoPE scaling that a config.json can name")


def _one_or_many(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
