"""What is sent in each mix: two kinds of request, how many of each, and when. Pure functions of a seed.

A *chat* has a short prompt and a long answer: it is what decodes. A *document* has a long prompt and a short answer: it
is what freezes others. A mix is how many chats run at a time, and how much of one core's prefill the documents take.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.balance import IDS

CHAT_PROMPT = 24
CHAT_TOKENS = 96
DOCUMENT_PROMPT = 1000
DOCUMENT_TOKENS = 16
CHATS = 4
"""Beside which the idle time of a token is taken."""
SHARED = 768
"""Tokens at the start of a document that others have too, in the mix with shared prefixes."""
PREFIXES = 3
"""How many such prefixes there are."""
FILL = 0.25
"""Of a turn: how long requests come before it is measured."""
PD_CHUNK = 256
"""Of a prefill worker: it freezes no stream, and a larger chunk reads the weights less often."""


@dataclass(frozen=True)
class Mix:
    """`chats` is the mean number of chats under way; `documents` the share of one core's time that computing the
    documents' tokens takes, those of a shared prefix left out."""

    name: str
    chats: float
    documents: float
    shared: int = 0


MIXES = (
    Mix("decode-heavy", chats=8.0, documents=0.10),
    Mix("balanced", chats=4.0, documents=0.30),
    Mix("prefill-heavy", chats=2.0, documents=0.55),
    Mix("shared-prefix", chats=4.0, documents=0.30, shared=SHARED),
)
SLO = 2.0
"""Times the idle figure, for TTFT and for the time per output token."""


@dataclass(frozen=True)
class Idle:
    """This machine now, undisturbed: seconds to a document's first token, for a token of `CHATS` chats at once, and
    what each other chat adds to that."""

    document_s: float
    token_s: float
    stream_s: float

    @property
    def slo_ttft_s(self) -> float:
        """What a first token may take."""
        return SLO * self.document_s

    @property
    def slo_tpot_s(self) -> float:
        """What a token may take on average."""
        return SLO * self.token_s

    def chats_s(self, mix: Mix) -> float:
        """Chats a second: Little's law, with the time of an answer when so many are under way. With that of fewer, more
        would be under way than the mix says, and slow each other further: eight grew to twenty."""
        return mix.chats / (CHAT_TOKENS * (self.token_s + self.stream_s * (mix.chats - CHATS)))

    def documents_s(self, mix: Mix) -> float:
        """Documents a second."""
        return mix.documents / self.document_s * DOCUMENT_PROMPT / (DOCUMENT_PROMPT - mix.shared)


@dataclass(frozen=True)
class Arrival:
    """One request: seconds after the start, and its kind."""

    at: float
    document: bool


def arrivals(mix: Mix, idle: Idle, seconds: float, seed: int) -> list[Arrival]:
    """A Poisson process of each kind given its count: so many points anywhere in `seconds`. The counts are the expected
    ones, at least one: turns differ in when requests come, and not in how many."""
    chance = random.Random(f"{mix.name} {seed}")
    found = []
    for document, rate in ((False, idle.chats_s(mix)), (True, idle.documents_s(mix))):
        found += [Arrival(chance.uniform(0.0, seconds), document) for _ in range(max(1, round(rate * seconds)))]
    return sorted(found, key=lambda arrival: arrival.at)


class Prompts:
    """Token ids: of a chat never seen before; of a document too, but for a shared prefix."""

    def __init__(self, mix: Mix) -> None:
        self._chance = random.SystemRandom()
        self._prefixes = [self._words(mix.shared) for _ in range(PREFIXES)] if mix.shared else [[]]

    def of(self, arrival: Arrival) -> tuple[list[int], int]:
        """The prompt, and how many tokens are asked for."""
        if not arrival.document:
            return self._words(CHAT_PROMPT), CHAT_TOKENS
        prefix = self._chance.choice(self._prefixes)
        return prefix + self._words(DOCUMENT_PROMPT - len(prefix)), DOCUMENT_TOKENS

    def first(self) -> list[list[int]]:
        """The shared prefixes, each with a few tokens more: to be sent once, so that they are known."""
        return [[*prefix, *self._words(8)] for prefix in self._prefixes if prefix]

    def _words(self, count: int) -> list[int]:
        return self._chance.choices(IDS, k=count)
