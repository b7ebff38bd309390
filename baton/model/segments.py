"""Where a text may be cut so that its pieces, tokenised one by one, give the ids of the whole.

The `tokenizers` library takes added tokens (`<|im_end|>`) out of a text first; normaliser, pre-tokenizer and model then
see each stretch between them alone. So the start of an added token is a place to cut: what stands before it cannot
change what comes after. That holds for tokens which are found in the raw text exactly as they are written. One that
takes in spaces beside it, or looks at its neighbours (`lstrip`, `rstrip`, `single_word`), could act across a cut: a
vocabulary that has such tokens is never cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

import tokenizers


class Segmenter:
    """Cuts texts for one vocabulary."""

    def __init__(self, added: Iterable[tokenizers.AddedToken]) -> None:
        raw = [token for token in added if not token.normalized]
        plain = all(token.content and not (token.lstrip or token.rstrip or token.single_word) for token in raw)
        # Of tokens that begin at the same place the library takes the longest.
        contents = sorted((token.content for token in raw), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, contents))) if plain and contents else None

    @property
    def cuts(self) -> bool:
        """Whether this vocabulary's texts are ever cut."""
        return self._pattern is not None

    def cut(self, text: str) -> list[str]:
        """The pieces of `text`, in order and none empty; each but the first begins with an added token."""
        if self._pattern is None:
            return [text] if text else []
        places = [0, *(found.start() for found in self._pattern.finditer(text)), len(text)]
        return [text[begin:end] for begin, end in pairwise(places) if begin < end]
