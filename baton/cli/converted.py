"""A model as vLLM loads it: a directory. A GGUF file is converted the first time, and kept by what is in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton.cli.errors import CliError
from baton.cli.fetch import Say
from baton.cli.home import Home


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
        if not (directory / "config.json").is_file():
            say("converting")
            convert(model, directory, replace=True, progress=lambda done, of: say(f"converting, {100 * done // of} %"))
    except (ModelError, BatonError) as error:
        why = error.message if isinstance(error, BatonError) else error
        hint = "--model takes a directory with *.safetensors too"
        raise CliError(f"{model} cannot be converted: {why}", hint) from error
    return directory
