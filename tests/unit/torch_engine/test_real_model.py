"""SmolLM2-135M, the model that the laptop serves, against transformers in float32."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from baton.engine.torch.host import TorchEngine
from baton.model.tokenizer import load_tokenizer
from tests.unit.torch_engine.client import Client, hand_over, request

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are:\n1.",
    "Q: Why is the sky blue?\nA:",
    "To bake a loaf of bread you need",
    "In 1969, the first humans",
    "A list of prime numbers: 2, 3, 5,",
]
TOKENS = 64
