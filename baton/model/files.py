"""A model's files, seen the same way whether they are a directory in the Hugging Face layout or one GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.model.errors import ModelError
from baton.model.gguf import GgufHeader, read_gguf


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies and its small files, parsed. Exactly one of `gguf` and the directory's fields is filled."""

    path: Path
    gguf: GgufHeader | None = None
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def default_name(self) -> str:
        """The served name when none is given: the directory's or file's, lower case, without the quantisation."""
        if self.gguf is None:
            return self.path.name.lower()
        stem = self.path.stem
        base, dot, last = stem.rpartition(".")
        return (base if dot and last[:1] in "QFBIqfbi" else stem).lower()

    @property
    def has_weights(self) -> bool:
        """Whether there is more than the text side."""
        return self.gguf is not None or any(self.path.glob("*.safetensors"))

    @property
    def context_length(self) -> int:
        """Positions the model was made for. Raises ModelError when the files do not say."""
        if self.gguf is not None:
            architecture = self.gguf.metadata.get("general.architecture", "")
            length = self.gguf.metadata.get(f"{architecture}.context_length")
        else:
            length = self.config.get("max_position_embeddings")
        if not isinstance(length, int) or length < 1:
            raise ModelError(f"{self.path.name} does not say its context length")
        return length

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state, and so of an embedding; 0 when the files do not say."""
        if self.gguf is not None:
            size = self.gguf.metadata.get(f"{self.gguf.metadata.get('general.architecture', '')}.embedding_length")
        else:
            size = self.config.get("hidden_size")
        return size if isinstance(size, int) else 0


def open_model(path: str | Path) -> ModelFiles:
    """Look at a model directory (config.json beside it all) or a .gguf file.

    Raises ModelError: nothing there, no config.json, or a file that is not GGUF.
    """
    path = Path(path)
    if path.is_file():
        return ModelFiles(path, gguf=read_gguf(path))
    if not path.is_dir():
        raise ModelError(f"there is no model at {path}")
    path = path.resolve()
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: expected a model directory or a .gguf file")
    return ModelFiles(
        path,
        config=_read_json(path / "config.json"),
        tokenizer_config=_read_json(path / "tokenizer_config.json"),
        generation_config=_read_json(path / "generation_config.json"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
