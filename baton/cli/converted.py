"""A model as vLLM loads it: a directory. A GGUF file is converted the first time, and kept by what is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from baton.cli.errors import CliError
from baton.cli.fetch import Say
from baton.cli.home import Home
from baton.cli.lock import making


def as_directory(home: Home, model: Path, say: Say) -> Path:
    """The directory to serve for `model`: itself when it is one. Raises CliError when a file cannot be converted."""
    if model.is_dir():
        return model
    from baton.convert.gguf import convert
    from baton.errors import BatonError
    from baton.model.card import load_card
    from baton.model.errors import ModelError

    try:
        card = load_card(model)
        content = hashlib.blake2b(card.SerializeToString(deterministic=True), digest_size=8).hexdigest()
        # The last part is the name it is served under, as the file's would be.
        directory = home.models / "converted" / content / card.model
        with making(directory.parent):
            if not (directory / "config.json").is_file():
                convert(model, directory, replace=True, progress=_percent(say))
    except (ModelError, BatonError) as error:
        why = error.message if isinstance(error, BatonError) else error
        hint = "--model takes a directory with *.safetensors too"
        raise CliError(f"{model} cannot be converted: {why}", hint) from error
    return directory


def _percent(say: Say) -> Callable[[int, int], None]:
    """Ten words of it, not one for each tensor."""

    def progress(done: int, of: int) -> None:
        say(f"converting, {10 * (10 * done // of)} %")

    return progress
