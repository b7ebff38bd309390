"""What the scheduler knows of a request: the job (its reservation) and its sequences, one for each choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from baton.engine.port import FinishReason, Request, TokenLogprob
from baton.engine.torch.grammars import Compiled
from baton.grammar.follow import Follower


class Phase(Enum):
    """Where a job is."""

    RESERVED = auto()  # blocks taken; KV may be loading
    PREFILL = auto()  # computing the prompt for a peer
    GENERATE = auto()
    EMBED = auto()  # summing the hidden states of the prompt
    ENDED = auto()


@dataclass(eq=False)
class Sequence:
    """One run of tokens with KV: `tokens[:computed]` have theirs in `slots`."""

    job: Job
    choice: int
    tokens: list[int]
    slots: list[int]
    computed: int = 0
    sealed: int = 0
    """Full blocks sealed so far, prefix hits included."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of full blocks: the prompt's are known at once, later ones are made as blocks fill."""
    forks: bool = False
    """The prompt's own sequence, whose end starts the choices."""
    follower: Follower | None = None
    """Where its output stands in the job's grammar; made at its first draw."""

    @property
    def remaining(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.computed


@dataclass(eq=False)
class Job:
    """A reservation and all that follows from it."""

    id: int
    request: Request
    order: int
    """Age: the lower came first."""
    prompt: list[int]
    """Prompt and emitted tokens: all that must have KV before the next token."""
    primary: Sequence = field(init=False)
    sequences: list[Sequence] = field(default_factory=list)
    """What runs now: the primary alone, or the choices."""
    phase: Phase = Phase.RESERVED
    hit_tokens: int = 0
    announced: int = 0
    """Prompt blocks already told to the prefill iterator."""
    first: dict[int, int] = field(default_factory=dict)
    """First tokens that were drawn elsewhere, by choice."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    hidden_sum: Tensor | None = None
    """Of an embedding: the sum [hidden] of the last hidden states computed so far."""
    grammar: Compiled | None = None
    finished: dict[int, FinishReason] = field(default_factory=dict)
    released: bool = False

    @property
    def batch(self) -> bool:
        """Whether it gives way to all others."""
        return self.request.batch

    @property
    def waits_for_grammar(self) -> bool:
        """Whether nothing can be drawn yet because its grammar is being compiled."""
        return self.grammar is not None and self.grammar.program is None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt position needs logits."""
        return self.request.sampling.prompt_logprobs is not None
