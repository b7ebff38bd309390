"""transformers on the real model: the oracle, read once in a session."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


@functools.cache
def oracle(model: Path) -> Any:
    """The GGUF file as transformers reads it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()
