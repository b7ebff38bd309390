"""Fixtures of the frontend's unit tests."""

from pathlib import Path

import pytest

from baton.model.card import Model, load_model


@pytest.fixture(scope="session")
def model(model_path: Path) -> Model:
    """The text side of the default model."""
    return load_model(model_path)
