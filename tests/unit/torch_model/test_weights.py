"""Weights against the tensors that transformers holds, out of both kinds of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.torch.config import load_config
from baton.engine.torch.linear import Linear
from baton.engine.torch.weights import Weights, load_weights
from baton.errors import BatonError, Reason
from tests.unit.torch_model.files import KINDS, write_directory, write_gguf

Tensors = dict[str, torch.Tensor]


def same_product(linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Packed weights cannot be looked at: the identity matrix reads them out."""
    found = linear(torch.eye(weight.shape[1], dtype=weight.dtype))
    expected = weight.T if bias is None else weight.T + bias
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def check(weights: Weights, tensors: Tensors, tied: bool) -> None:
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, tensors["model.norm.weight"])
    same_product(weights.head, tensors["model.embed_tokens.weight" if tied else "lm_head.weight"])
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}."

        def join(parts: str, kind: str, at: str = at) -> torch.Tensor:
            return torch.cat([tensors[f"{at}{part}.{kind}"] for part in parts.split()])

        projections = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
        bias = join(projections, "bias") if f"{at}self_attn.q_proj.bias" in tensors else None
        same_product(layer.qkv, join(projections, "weight"), bias)
        same_product(layer.out, tensors[f"{at}self_attn.o_proj.weight"])
        same_product(layer.gate_up, join("mlp.gate_proj mlp.up_proj", "weight"))
        same_product(layer.down, tensors[f"{at}mlp.down_proj.weight"])
        assert torch.equal(layer.input_norm, tensors[f"{at}input_layernorm.weight"])
        assert torch.equal(layer.post_norm, tensors[f"{at}post_attention_layernorm.weight"])
        if f"{at}self_attn.q_norm.weight" in tensors:
            assert layer.qk_norm is not None
            q, k = (tensors[f"{at}self_attn.{name}_norm.weight"] for name in "qk")
            assert torch.equal(layer.qk_norm, torch.cat((q.expand(4, -1), k.expand(2, -1))))
        else:
            assert layer.qk_norm is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory(tmp_path: Path, kind: str) -> None:
    model = write_directory(tmp_path, kind)
    config = load_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.float32)
    assert len(weights.layers) == config.layers
    check(weights, dict(model.state_dict()), config.tie_embeddings)


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = write_directory(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check(load_weights(tmp_path, load_config(tmp_path), torch.float32), dict(model.state_dict()), tied=False)


def test_cast_to_the_asked_dtype(tmp_path: Path) -> None:
    model = write_directory(tmp_path, "llama")
    weights = load_weights(tmp_path, load_config(tmp_path), torch.bfloat16)
    check(weights, {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}, tied=False)


@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_a_gguf(tmp_path: Path, kind: str, quantisation: str) -> None:
    model = write_directory(tmp_path / "model", kind)
    path = tmp_path / "model.gguf"
    held = write_gguf(path, model, gguf.GGMLQuantizationType[quantisation])
    config = load_config(path)
    tensors = {name: torch.from_numpy(values.copy()) for name, values in held.items()}
    check(load_weights(path, config, torch.float32), tensors, config.tie_embeddings)


def change(path: Path, edit: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def test_a_tied_head_in_the_file_is_left_aside(tmp_path: Path) -> None:
    model = write_directory(tmp_path, "llama-tied")
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    check(load_weights(tmp_path, load_config(tmp_path), torch.float32), dict(model.state_dict()), tied=True)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), "model.norm.weight"),
        (lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)}), "o_proj.bias"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}), "layers.2"),
    ],
    ids=["missing", "shape", "unknown", "one layer too many"],
)
def test_files_that_do_not_fit_the_config(tmp_path: Path, edit: Any, named: str) -> None:
    write_directory(tmp_path, "llama")
    change(tmp_path, edit)
    with pytest.raises(BatonError, match=named) as caught:
        load_weights(tmp_path, load_config(tmp_path), torch.float32)
    assert caught.value.reason is Reason.INVALID_REQUEST


def test_no_weights(tmp_path: Path) -> None:
    write_directory(tmp_path, "llama")
    config = load_config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BatonError, match=r"no \.safetensors"):
        load_weights(tmp_path, config, torch.float32)


def test_torn_files(tmp_path: Path) -> None:
    model = write_directory(tmp_path / "model", "llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, model, gguf.GGMLQuantizationType.Q8_0)
    for file, target in ((path, path), (tmp_path / "model" / "model.safetensors", tmp_path / "model")):
        config = load_config(target)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(BatonError, match="cannot be read") as caught:
            load_weights(target, config, torch.float32)
        assert caught.value.reason is Reason.INVALID_REQUEST
