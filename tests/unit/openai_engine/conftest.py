"""The text side of the real model: what an upstream's prompts are tokenised with."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.model.card import Model, load_model


@pytest.fixture(scope="session")
def model(model_path: Path) -> Model:
    return load_model(model_path, "served", weights=False)
