"""A GGUF file to a directory that transformers, vLLM and our torch engine load: dequantised, nothing else changed.

    config.json, generation_config.json     the shape, where an output ends
    tokenizer.json, tokenizer_config.json   the tokenizer as Baton builds it from the file, the chat template
    model.safetensors                       every tensor by its Hugging Face name, in the row order of that layout
    baton-origin.json                       that it is the same model as the file: `baton.model.origin`

In float32 the numbers are those that the file means, so weights and KV of the two are one; bfloat16 halves the size and
rounds, which makes it a model of its own.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from baton.convert.config import config_json, generation_json
from baton.convert.tensors import INDEX, save_tensors
from baton.engine.torch.config import load_config
from baton.engine.torch.gguf import tensors
from baton.model.errors import ModelError
from baton.model.files import ModelFiles, open_model
from baton.model.generation import load_generation
from baton.model.identity import weights_identity
from baton.model.origin import ORIGIN, write_origin
from baton.model.template import load_template
from baton.model.tokenizer import Tokenizer, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIG = "config.json"
"""Goes first and comes last: with it the directory is a model."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
REPLACED = (CONFIG, *TOKENIZER, "generation_config.json", INDEX, ORIGIN)
"""What a model that is written over loses beside its model*.safetensors: all that would speak of the new one."""

Progress = Callable[[int, int], None]
"""Values written so far, and how many there are."""


def convert(
    source: Path, directory: Path, *, dtype: str = "float32", replace: bool = False, progress: Progress | None = None
) -> None:
    """Write the model in `source` (a .gguf file) to `directory`, whole or not at all.

    `replace` writes over a model that is there; any other file in `directory` stays.
    Raises ModelError: the file is no GGUF or cannot be converted, `directory` has something in it, the disk is full.
    BatonError(INVALID_REQUEST): a model that the torch engine, whose reader this is, does not know.
    """
    files = open_model(source)
    if files.gguf is None:
        raise ModelError(f"{source} is a directory already: only a .gguf file is converted")
    if directory.exists() and not directory.is_dir():
        raise ModelError(f"{directory} is a file, not a directory")
    if directory.is_dir() and any(directory.iterdir()) and not replace:
        raise ModelError(f"{directory} is not empty")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as folder:
            made = Path(folder) / "model"
            made.mkdir()
            _write(files, made, dtype, progress or (lambda done, of: None))
            _move(made, directory)
    except (OSError, SafetensorError) as error:  # the latter says so of a full disk
        why = getattr(error, "strerror", None) or error
        raise ModelError(f"{directory} cannot be written: {why}") from error


def _write(files: ModelFiles, made: Path, dtype: str, progress: Progress) -> None:
    assert files.gguf is not None
    config = load_config(files.path)
    tokenizer = load_tokenizer(files)
    bos_id = files.gguf.metadata.get("tokenizer.ggml.bos_token_id")
    _json(made / CONFIG, config_json(config, dtype, bos_id))
    _json(made / "generation_config.json", generation_json(load_generation(files), bos_id))
    (made / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    _json(made / "tokenizer_config.json", _tokenizer_config(files, tokenizer, config.max_context))

    of = sum(math.prod(t.shape) for t in files.gguf.tensors)
    done = 0

    def wrote(values: int) -> None:
        nonlocal done
        done += values
        progress(done, of)

    save_tensors(made, tensors(files.path, config.heads, config.kv_heads), DTYPES[dtype], wrote)
    same_as = {"tokenizer": (load_tokenizer(made).digest, tokenizer.digest)}
    if dtype == "float32":
        same_as["weights"] = (weights_identity(made), weights_identity(files))
    write_origin(made, same_as)


def _tokenizer_config(files: ModelFiles, tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    template = load_template(files).text
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token or None,
        "eos_token": tokenizer.eos_token or None,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}),
    }


def _move(made: Path, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for old in (*REPLACED, *(file.name for file in directory.glob("model*.safetensors"))):
        (directory / old).unlink(missing_ok=True)
    for file in sorted(made.iterdir(), key=lambda file: file.name == CONFIG):
        os.replace(file, directory / file.name)


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
