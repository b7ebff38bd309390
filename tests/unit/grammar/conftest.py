"""The default model's text side."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.model.card import Model, load_model


@pytest.fixture(scope="session")
def model(model_path: Path) -> Model:
    return load_model(model_path)
