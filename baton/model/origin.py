"""Where a converted directory came from, so that it and its source are one model to the fleet.

`baton model convert` leaves `baton-origin.json` beside what it writes: for the tokenizer and for the weights the digest
of the files as written, and the digest of the GGUF they say the same as. A claim counts only while the files are still
those: whoever edits or retrains them has a model of its own again.
"""

from __future__ import annotations

import json
from pathlib import Path

ORIGIN = "baton-origin.json"


def write_origin(directory: Path, same_as: dict[str, tuple[str, str]]) -> None:
    """Note, for each part ("tokenizer", "weights"), the digest of the files written and that of their source."""
    claims = {part: {"of": ours, "is": source} for part, (ours, source) in same_as.items()}
    (directory / ORIGIN).write_text(json.dumps(claims, indent=1) + "\n", encoding="utf-8")


def original(directory: Path, part: str, digest: str) -> str:
    """The digest that `part` of the source had if `digest` is that of the files as converted, else `digest` itself."""
    try:
        claim = json.loads((directory / ORIGIN).read_text(encoding="utf-8"))[part]
        of, source = claim["of"], claim["is"]
    except (OSError, ValueError, LookupError, TypeError):
        return digest
    return source if of == digest and isinstance(source, str) and len(source) == len(digest) else digest
