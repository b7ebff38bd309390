"""Tensors of a GGUF file, dequantised, under the names and in the row order of the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from torch import Tensor

from baton.errors import BatonError, Reason
from baton.model.gguf import GgufHeader, TensorInfo, read_gguf

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_tensor(path: Path, header: GgufHeader, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One tensor, dequantised to float32, outermost dimension first.

    Raises BatonError(INVALID_REQUEST) when its type cannot be dequantised or the file ends before its data does.
    """
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = (*reversed(info.shape[1:]), info.shape[0] // block * size)
        start = header.data_start + info.offset
        raw = np.fromfile(path, np.uint8, int(np.prod(rows)), offset=start).reshape(rows)
        return np.asarray(quants.dequantize(raw, kind), dtype=np.float32)
    except (ValueError, NotImplementedError, KeyError) as error:
        message = f"tensor {info.name} of {path.name} (ggml type {info.kind}) cannot be read: {error}"
        raise BatonError(Reason.INVALID_REQUEST, message, param="model") from error


def tensors(path: Path, heads: int, kv_heads: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its Hugging Face name, float32. A tensor that no supported family has is refused."""
    header = read_gguf(path)
    permuted = {"q_proj": heads, "k_proj": kv_heads} if header.metadata["general.architecture"] == "llama" else {}
    for info in header.tensors:
        if info.name == "rope_freqs.weight":  # in the config already
            continue
        name = _name(info.name)
        tensor = torch.from_numpy(read_tensor(path, header, info))
        projection = name.split(".")[-2]
        yield name, _unpermute(tensor, permuted[projection]) if projection in permuted else tensor


def _name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    raise BatonError(Reason.INVALID_REQUEST, f"GGUF tensor {name} is unknown to the torch engine", param="model")


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """llama-architecture files hold a head's rotary pairs side by side; here dimension i pairs with i + half."""
    pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape)
