"""Tiny random models of every family, written the way their makers write them: directories and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOKENS = ["<pad>", "<bos>", "<eos>", *map(chr, range(ord("!"), ord("!") + 92)), "ab"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
KINDS = ("llama", "llama-tied", "llama3-rope", "qwen2", "qwen3")


def hf_config(kind: str) -> PretrainedConfig:
    """The transformers config of one of `KINDS`."""
    match kind:
        case "llama":
            return LlamaConfig(**SIZES, tie_word_embeddings=False)
        case "llama-tied":
            return LlamaConfig(**SIZES, tie_word_embeddings=True)
        case "llama3-rope":
            return LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3)
        case "qwen2":
            return Qwen2Config(**SIZES, tie_word_embeddings=True)
        case "qwen3":
            return Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False)
    raise ValueError(kind)


def write_directory(directory: Path, kind: str, **save: Any) -> PreTrainedModel:
    """Save a random model of that kind in float32 and return it. Norms and biases are random too: all ones and zeros
    would hide a swap."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(hf_config(kind), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory, **save)
    return model


_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    matrices: gguf.GGMLQuantizationType,
    extra: dict[str, Any] | None = None,
    *,
    tokenizer: bool = False,
    rope_factors: np.ndarray[Any, Any] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Write the model as a GGUF with its matrices of that type; what each tensor holds after quantisation, by HF name.

    Query and key rows of the llama architecture are interleaved, as converters do. `extra` adds metadata,
    `tokenizer` one of `TOKENS` with a chat template, `rope_factors` a tensor of them.
    """
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_eos_token_id(config.eos_token_id)
    for name, value in (extra or {}).items():
        writer.add_uint32(name, value)
    if tokenizer:
        _add_tokenizer(writer)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    held: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        kind = matrices if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        held[name] = quants.dequantize(quants.quantize(values, kind), kind).reshape(values.shape)
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = _interleave(values, heads)
        writer.add_tensor(_gguf_name(name), quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)


def _interleave(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows 0, half, 1, half + 1 ... of every head."""
    size = weight.shape[0] // heads
    order = [head * size + i + half for head in range(heads) for i in range(size // 2) for half in (0, size // 2)]
    return weight[order]


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}"
