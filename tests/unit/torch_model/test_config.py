"""The architecture as read from real config files; what would be computed wrongly is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from baton.engine.torch.config import load_config
from baton.errors import BatonError, Reason
from tests.unit.torch_model.files import KINDS, SIZES, hf_config, write_directory, write_gguf


def directory(path: Path, kind: str, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The config files of a model of that kind, some fields changed."""
    hf_config(kind).save_pretrained(path)
    raw = json.loads((path / "config.json").read_text())
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    raw = {**raw, "architectures": [architecture[raw["model_type"]]], **changes}
    (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory(tmp_path: Path, kind: str) -> None:
    config = load_config(directory(tmp_path, kind))
    assert config.family == (kind if kind.startswith("qwen") else "llama")
    assert (config.layers, config.hidden, config.heads, config.kv_heads) == (2, 64, 4, 2)
    assert (config.intermediate, config.vocab, config.max_context) == (96, 96, 512)
    assert config.head_dim == (32 if kind == "qwen3" else 16)
    assert config.tie_embeddings == (kind not in ("llama", "qwen3"))
    assert config.rms_eps == pytest.approx(1e-6)
    assert config.qkv_bias == (kind == "qwen2")
    assert config.qk_norm == (kind == "qwen3")
    assert config.eos_token_ids == (2,)
    assert (config.rope_scaling is not None) == (kind == "llama3-rope")
    assert config.rope_theta == (500000.0 if kind == "llama3-rope" else 10000.0)


def test_rope_in_the_older_spelling(tmp_path: Path) -> None:
    scaling = {
        "type": "llama3",
        "factor": 4,
        "low_freq_factor": 1,
        "high_freq_factor": 2,
        "original_max_position_embeddings": 99,
    }
    path = directory(tmp_path, "llama", rope_parameters=..., rope_theta=7000, rope_scaling=scaling)
    config = load_config(path)
    assert config.rope_theta == 7000.0
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 4.0
    assert config.rope_scaling.high_freq_factor == 2.0
    assert config.rope_scaling.original_context == 99


@pytest.mark.parametrize(
    ("generation", "expected"), [(None, (2,)), ({}, (2,)), ({"eos_token_id": [5, 3]}, (2, 3, 5))], ids=str
)
def test_every_end_of_text_counts(tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert load_config(directory(tmp_path, "llama", generation)).eos_token_ids == expected


def test_kv_heads_default_to_the_query_heads(tmp_path: Path) -> None:
    assert load_config(directory(tmp_path, "llama", num_key_value_heads=...)).kv_heads == 4


def test_a_qwen_window_that_is_off_is_no_window(tmp_path: Path) -> None:
    path = directory(tmp_path, "qwen2", sliding_window=128, use_sliding_window=False)
    assert load_config(path).family == "qwen2"


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("llama", {"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ("llama", {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ("llama", {"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
        ("llama", {"architectures": []}, "architecture"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128}, "sliding"),
        ("llama", {"sliding_window": 128}, "sliding"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"num_key_value_heads": 3}, "sizes"),
        ("llama", {"head_dim": 15}, "sizes"),
        ("llama", {"num_hidden_layers": 0}, "sizes"),
        ("llama", {"hidden_size": ...}, "hidden_size"),
        ("llama", {"hidden_size": "wide"}, "wide"),
        ("llama", {"max_position_embeddings": ...}, "context length"),
    ],
    ids=str,
)
def test_refused_by_name(tmp_path: Path, kind: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BatonError, match=named) as caught:
        load_config(directory(tmp_path, kind, **changes))
    assert caught.value.reason is Reason.INVALID_REQUEST


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(BatonError) as caught:
            load_config(path)
        assert caught.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_a_gguf_says_what_its_directory_says(tmp_path: Path, kind: str) -> None:
    model = write_directory(tmp_path / "model", kind)
    write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.F32)
    found, expected = load_config(tmp_path / "model.gguf"), load_config(tmp_path / "model")
    assert found.rms_eps == pytest.approx(expected.rms_eps)  # a GGUF holds it in 32 bits
    assert replace(found, rms_eps=expected.rms_eps) == expected


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("llama.expert_count", 8, "mixture-of-experts"),
        ("llama.attention.sliding_window", 64, "sliding"),
        ("llama.rope.dimension_count", 8, "narrower"),
        ("llama.attention.value_length", 8, "narrower"),
    ],
)
def test_a_gguf_refused_by_name(tmp_path: Path, field: str, value: int, named: str) -> None:
    model = write_directory(tmp_path / "model", "llama")
    write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.F32, {field: value})
    with pytest.raises(BatonError, match=named):
        load_config(tmp_path / "model.gguf")


def test_a_gguf_of_another_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(BatonError, match="gemma3"):
        load_config(tmp_path / "model.gguf")
