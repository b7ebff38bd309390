"""What is wrong with a model's files."""

from __future__ import annotations


class ModelError(ValueError):
    """The model's files cannot be used; the message names the file, the kind or the field, and what would help."""
