"""What a step computes, draws and tells."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from baton.engine.port import PrefillDone, SamplingParams, TokenEvent, TokenLogprob
from baton.engine.torch.batch import Logits
from baton.engine.torch.sequence import Job, Sequence
from baton.errors import Reason
from baton.grammar.follow import Follower


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: `count` tokens from `sequence.computed` on. `logits`: none, last or all."""

    sequence: Sequence
    count: int
    logits: Logits


@dataclass
class Draw:
    """One token to sample from the logits of a sequence's last row."""

    sequence: Sequence
    choice: int
    params: SamplingParams
    prompt_ids: abc.Sequence[int]
    output_ids: list[int]
    follower: Follower | None = None
    """Its grammar's state, of `output_ids` or of a beginning of them."""


@dataclass(frozen=True)
class Drawn:
    """What was sampled; `failure` says why nothing could be, which ends this request and no other."""

    token_id: int
    logprob: TokenLogprob | None
    failure: str = ""
    grammar: bool = False
    """Whether it is the grammar's fault."""


@dataclass
class Outcome:
    """What a step, or a message, has to tell."""

    tokens: list[TokenEvent] = field(default_factory=list)
    announce: list[Job] = field(default_factory=list)
    prefilled: list[tuple[Job, PrefillDone]] = field(default_factory=list)
    failed: list[tuple[Job, Reason, str]] = field(default_factory=list)
    embedded: list[Job] = field(default_factory=list)
