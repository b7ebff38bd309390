"""A converted model is the model it was converted from: to transformers, to our engine, and to the fleet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from baton.cli.model import app
from baton.convert.gguf import convert
from baton.convert.tensors import INDEX, save_tensors
from baton.engine.torch.config import load_config
from baton.engine.torch.gguf import tensors
from baton.errors import BatonError
from baton.model.card import card_difference, load_card, load_model
from baton.model.errors import ModelError
from tests.unit.torch_model.files import KINDS, TEMPLATE, TOKENS, hf_config, write_directory, write_gguf
from tests.unit.torch_model.run import Run, open_torch_model

F32, Q8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
PROMPTS = {"a": [5, 9, 40, 41, 7], "b": list(range(3, 80))}


def write(path: Path, kind: str, matrices: gguf.GGMLQuantizationType = F32, **more: Any) -> Path:
    """A GGUF file with everything that a converter puts into one."""
    if kind == "llama3-rope":
        more["rope_factors"] = _llama3_factors(hf_config(kind))
    write_gguf(path, write_directory(path.parent / "source", kind), matrices, tokenizer=True, **more)
    return path


def _llama3_factors(config: Any) -> np.ndarray[Any, Any]:
    """How llama.cpp's converter works llama3 scaling out: what divides each frequency."""
    rope = config.rope_parameters | {"original_max_position_embeddings": 8192}
    size = config.hidden_size // config.num_attention_heads
    factors = []
    for i in range(size // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * i / size)
        low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors)


def test_the_command_says_where_the_model_is_and_nothing_else(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", KINDS[0])
    done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out")])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'out'}: ready for --model\n"
    again = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--force", "--json"])
    assert json.loads(again.stdout) == {"directory": str(tmp_path / "out"), "dtype": "float32"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_reads_the_same_from_the_directory(tmp_path: Path, kind: str) -> None:
    source = write(tmp_path / "m.gguf", kind, Q8)
    convert(source, tmp_path / "out")
    expected = Run(open_torch_model(source)).greedy(PROMPTS, 12)
    assert Run(open_torch_model(tmp_path / "out")).greedy(PROMPTS, 12) == expected

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    for name, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        output = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[], pad_token_id=0)
        assert output[0, len(prompt) :].tolist() == expected[name]


def test_transformers_has_the_text_side_too(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "llama-tied")
    convert(source, tmp_path / "out")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), load_model(source)
    text = "abc ab<eos>cab"
    assert theirs(text).input_ids == ours.tokenizer.encode(text, add_special=True)
    assert (theirs.bos_token, theirs.eos_token) == (TOKENS[1], TOKENS[2])
    messages = [{"role": "user", "content": "ab"}]
    said = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert said == ours.template.render(messages)
    assert theirs.chat_template == TEMPLATE


def test_it_is_the_same_model_to_the_fleet(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "qwen2", extra={"tokenizer.ggml.eot_token_id": 7})
    convert(source, tmp_path / "out")
    card = load_card(source, "m")
    assert card_difference(load_card(tmp_path / "out", "m"), card) == []
    assert load_model(tmp_path / "out").context_length == load_model(source).context_length


def test_who_changes_a_file_has_another_model(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "llama")
    convert(source, tmp_path / "out")
    card = load_card(source, "m")

    tokenizer = tmp_path / "out" / "tokenizer.json"
    before = tokenizer.read_text()
    tokenizer.write_text(before + "\n")
    assert card_difference(load_card(tmp_path / "out", "m"), card) == ["tokenizer"]
    tokenizer.write_text(before)

    weights = tmp_path / "out" / "model.safetensors"
    held = load_file(weights)
    held["model.norm.weight"][0] += 1
    save_file(held, weights)
    assert card_difference(load_card(tmp_path / "out", "m"), card) == ["weights"]


def test_rounded_weights_are_a_model_of_their_own(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "llama")
    convert(source, tmp_path / "out", dtype="bfloat16")
    assert card_difference(load_card(tmp_path / "out", "m"), load_card(source, "m")) == ["weights"]
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    config = load_config(source)
    for name, tensor in tensors(source, config.heads, config.kv_heads):
        assert torch.equal(held[name], tensor.bfloat16())


def test_a_full_directory_is_refused_or_written_over(tmp_path: Path) -> None:
    source, out = write(tmp_path / "m.gguf", "llama"), tmp_path / "out"
    out.mkdir()
    for name in ("notes.txt", "chat_template.jinja", "model-00001-of-00009.safetensors", INDEX):
        (out / name).write_text("{}")
    with pytest.raises(ModelError, match="not empty"):
        convert(source, out)
    assert (out / INDEX).read_text() == "{}"
    convert(source, out, replace=True)
    assert (out / "notes.txt").read_text() == "{}"
    assert not (out / INDEX).exists()
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]
    assert card_difference(load_card(out, "m"), load_card(source, "m")) == []


@pytest.mark.parametrize("fault", ["no gguf", "tensor", "rope", "directory", "file"])
def test_what_cannot_be_converted_leaves_nothing(tmp_path: Path, fault: str) -> None:
    source, out = tmp_path / "in" / "m.gguf", tmp_path / "out" / "deep"
    source.parent.mkdir()
    match fault:
        case "no gguf":
            source.write_text("hello")
        case "tensor":
            write(source, "llama", extra={"llama.expert_count": 2})
        case "rope":
            write(source, "llama", rope_factors=np.linspace(1, 3, 8))
        case "directory":
            source = source.parent
            (source / "config.json").write_text("{}")
        case "file":
            write(source, "llama")
            out = tmp_path / "taken"
            out.write_text("mine")
    with pytest.raises((ModelError, BatonError)):
        convert(source, out)
    assert not out.is_dir()
    assert not out.parent.is_dir() or [p for p in out.parent.iterdir() if p.name.startswith(".")] == []


def test_large_models_are_several_files(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "llama")
    convert(source, tmp_path / "one")
    held = load_file(tmp_path / "one" / "model.safetensors")
    (tmp_path / "one" / "model.safetensors").unlink()
    wrote: list[int] = []
    save_tensors(tmp_path / "one", held.items(), torch.float32, wrote.append, shard_bytes=60_000)
    index = json.loads((tmp_path / "one" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert all((tmp_path / "one" / file).stat().st_size < 70_000 for file in files)
    assert index["metadata"]["total_size"] == 4 * sum(wrote) == sum(t.nbytes for t in held.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, held[name])


@pytest.mark.slow
def test_the_default_model(model_path: Path, converted_path: Path) -> None:
    """What `baton up --engine vllm` serves: its greedy text in f32 is the GGUF's."""
    assert card_difference(load_card(converted_path, "m"), load_card(model_path, "m")) == []
    prompts = {"a": [504, 3575, 282, 4649, 314], "b": list(range(1000, 1070))}
    found = [Run(open_torch_model(path)).greedy(prompts, 16) for path in (model_path, converted_path)]
    assert found[0] == found[1]
