"""The weights' name follows their content: not the file's name, not the tokenizer, but every tensor."""

import json
import struct
from pathlib import Path

import pytest

from baton.model.card import card_difference
from baton.model.errors import ModelError
from baton.model.files import open_model
from baton.model.generation import load_generation
from baton.model.gguf import read_gguf
from baton.model.identity import weights_identity
from baton.v1.registry_pb2 import ModelCard


def _model(path: Path, tensors: dict[str, bytes], config: dict[str, object] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    offset, table, data = 0, {}, b""
    for name, raw in tensors.items():
        table[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [offset, offset + len(raw)]}
        offset, data = offset + len(raw), data + raw
    header = json.dumps(table).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 64} | (config or {})))
    return path


def test_equal_content_has_equal_identity(tmp_path: Path) -> None:
    tensors = {"a": b"x" * 5000, "b": b"y" * 3}
    one = weights_identity(_model(tmp_path / "one", tensors, {"transformers_version": "1"}))
    two = weights_identity(_model(tmp_path / "two", tensors, {"transformers_version": "2"}))
    assert one == two
    assert len(one) == 32


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({"a": b"z" + b"x" * 4999, "b": b"yyy"}, {}),
        ({"a": b"x" * 4999 + b"z", "b": b"yyy"}, {}),
        ({"a": b"x" * 5000, "b": b"yyz"}, {}),
        ({"a": b"x" * 5000, "c": b"yyy"}, {}),
        ({"a": b"x" * 5000, "b": b"yyy"}, {"rope_theta": 1.0}),
    ],
)
def test_any_difference_shows(tmp_path: Path, tensors: dict[str, bytes], config: dict[str, object]) -> None:
    base = weights_identity(_model(tmp_path / "base", {"a": b"x" * 5000, "b": b"yyy"}))
    assert weights_identity(_model(tmp_path / "other", tensors, config)) != base


def test_gguf_identity_ignores_the_name_and_sees_the_data(tmp_path: Path, model_path: Path) -> None:
    copy = tmp_path / "other.gguf"
    copy.write_bytes(model_path.read_bytes())
    assert weights_identity(copy) == weights_identity(model_path)
    header = read_gguf(copy)
    with copy.open("r+b") as file:
        file.seek(header.data_start + header.tensors[7].offset)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert weights_identity(copy) != weights_identity(model_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"nope" * 9, b"GGUF" + struct.pack("<IQQ", 9, 0, 0)])
def test_files_that_are_not_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError):
        open_model(path)


@pytest.mark.parametrize("cut", [100, 5000, 1_000_000])
def test_a_truncated_gguf_is_refused(tmp_path: Path, model_path: Path, cut: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(model_path.read_bytes()[:cut])
    with pytest.raises(ModelError):
        open_model(path)


def test_missing_and_torn_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model"):
        open_model(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="safetensors"):
        weights_identity(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(ModelError, match="not a safetensors"):
        weights_identity(tmp_path)


def test_generation_defaults_and_ends(tmp_path: Path) -> None:
    _model(tmp_path, {"a": b"x"}, {"eos_token_id": 5})
    assert load_generation(open_model(tmp_path)).eos_ids == (5,)
    config = {"eos_token_id": [9, 7, 9], "temperature": 0.6, "top_k": 20, "top_p": "x", "min_p": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    generation = load_generation(open_model(tmp_path))
    assert generation.eos_ids == (7, 9)
    assert (generation.temperature, generation.top_k, generation.top_p, generation.min_p) == (0.6, 20, 1.0, 0.0)


def test_a_card_that_does_not_say_its_weights_differs_in_none() -> None:
    """An upstream's, or a frontend's that has only the tokenizer."""
    whole = ModelCard(model="m", weights="w", tokenizer="t", chat_template="c", generation_config="g")
    other = ModelCard(model="m", weights="", tokenizer="t", chat_template="c", generation_config="g")
    assert card_difference(whole, other) == card_difference(other, whole) == []
    other.tokenizer, other.model = "u", "n"
    assert card_difference(whole, other) == ["model", "tokenizer"]
