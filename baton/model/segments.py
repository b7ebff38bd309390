"""Where a text may be cut so that its pieces, tokenised one by one, give the ids of the whole.

The `tokenizers` library takes added tokens (`<|im_end|>`) out of a text first; normaliser, pre-tokenizer and model then
see each stretch between them alone. So the start of an added token is a place to cut: what stands before it cannot
change what comes after. That holds for tokens which are found in the raw text exactly as they are written. One that
takes in spaces beside it, or looks at its neighbours (`lstrip`, `rstrip`, `single_word`), could act across a cut: a
vocabulary that has such tokens is never cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

import tokenizers


class Segmenter:
    """Cuts texts for one vocabulary, of which `added` are the added tokens by id."""

    def __init__(self, added: Mapping[int, tokenizers.AddedToken]) -> None:
        raw = {i: token for i, token in added.items() if not token.normalized}
        plain = all(t.content and not (t.lstrip or t.rstrip or t.single_word) for t in raw.values())
        # Of tokens that begin at the same place the library takes the longest.
        contents = sorted((token.content for token in raw.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, contents))) if plain and contents else None
        self._ids = frozenset(raw)

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

    def part(self, ids: list[int], pieces: list[str]) -> list[list[int]] | None:
        """The ids of each of some neighbouring pieces, out of those of all together; None when that cannot be told.

        Every piece but perhaps the first adds one token to look for. When there are no more of them than pieces, each
        is where its piece begins.
        """
        if self._pattern is None or not pieces:
            return None
        begins = [position for position, token_id in enumerate(ids) if token_id in self._ids]
        if self._pattern.match(pieces[0]) is None:
            begins.insert(0, 0)
        if len(begins) != len(pieces):
            return None
        return [ids[begin:end] for begin, end in pairwise([*begins, len(ids)])]
