"""What the model's makers say about generating with it: where it ends, and their sampling defaults."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from baton.model.files import ModelFiles


@dataclass(frozen=True)
class GenerationConfig:
    """`eos_ids` end an output. The rest are defaults for requests that do not say; neutral when the files do not."""

    eos_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def digest(self) -> str:
        """Names the content; part of the model card."""
        encoded = json.dumps(asdict(self), sort_keys=True).encode()
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def load_generation(files: ModelFiles) -> GenerationConfig:
    """From generation_config.json (and config.json for the ends), or from the GGUF's token ids."""
    if files.gguf is not None:
        names = ("eos", "eot", "eom")
        ids = [files.gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        return GenerationConfig(eos_ids=_ids(ids))
    config = files.generation_config
    return GenerationConfig(
        eos_ids=_ids(config.get("eos_token_id", files.config.get("eos_token_id"))),
        temperature=_number(config, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(config, "top_p", 1.0, 1e-6, 1.0),
        top_k=int(_number(config, "top_k", 0, 0, 1 << 30)),
        min_p=_number(config, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_number(config, "repetition_penalty", 1.0, 0.01, 10.0),
    )


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(sorted({v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0}))


def _number(config: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A default that the files give, when it is a number a request could have given as well."""
    value = config.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    return default
