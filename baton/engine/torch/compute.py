"""The numbers of a step: from what the scheduler planned to logits, and from logits to drawn tokens."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from baton.engine.torch.batch import Batch, SequenceSlice
from baton.engine.torch.model import Model
from baton.engine.torch.sampler import Sampled, SamplingState, sample, token_logprobs
from baton.engine.torch.sequence import Phase
from baton.engine.torch.step import Draw, Drawn, Work
from baton.grammar.follow import GrammarFailedError, may_follow


class Computation:
    """One step's logits, and which of their rows belong to whom. Creating it runs the model, as long as it is `wanted`:
    else raises GivenUp (see `Model.forward_and_sum`)."""

    def __init__(self, model: Model, work: list[Work], wanted: Callable[[], bool]) -> None:
        self._vocab = model.config.vocab
        self._eos = model.config.eos_token_ids
        self._work = work
        slices = [
            SequenceSlice(
                w.sequence.tokens[w.sequence.computed : w.sequence.computed + w.count],
                w.sequence.computed,
                w.sequence.slots,
                w.logits,
                summed=w.sequence.job.phase is Phase.EMBED,
            )
            for w in work
        ]
        self._logits, self._sums = model.forward_and_sum(Batch(slices), wanted)
        self._rows: list[range] = []
        end = 0
        for item in work:
            start, end = end, end + {"none": 0, "last": 1, "all": item.count}[item.logits]
            self._rows.append(range(start, end))

    def keep_prompt_logprobs(self) -> None:
        """Add what this step says of prompt tokens to the jobs that want it. Before the scheduler counts the step."""
        for item, rows in zip(self._work, self._rows, strict=True):
            job, at = item.sequence.job, item.sequence.computed
            count = job.request.sampling.prompt_logprobs
            if item.logits != "all" or count is None:
                continue
            following = job.prompt[at + 1 : at + 1 + item.count]
            if not job.prompt_logprobs:
                job.prompt_logprobs.append(None)  # the first prompt token follows nothing
            if following:
                logits = self._logits[rows.start : rows.start + len(following)]
                job.prompt_logprobs += token_logprobs(logits, following, [count] * len(following))

    def keep_sums(self) -> None:
        """Add what this step says of inputs that are embedded to their jobs."""
        jobs = [w.sequence.job for w in self._work if w.sequence.job.phase is Phase.EMBED]
        for job, part in zip(jobs, self._sums, strict=True):
            job.hidden_sum = part if job.hidden_sum is None else job.hidden_sum + part

    def draw(self, draws: list[Draw]) -> list[Drawn]:
        """One token for each, in order. What one request's parameters break fails that request only."""
        if not draws:
            return []
        masks: dict[int, torch.Tensor] = {}
        failed: dict[int, Drawn] = {}
        for i, draw in enumerate(draws):
            try:
                if draw.follower is not None:
                    masks[i] = self._mask(draw)
            except GrammarFailedError as error:
                failed[i] = Drawn(0, None, str(error), grammar=True)
        drawn = iter(self._sampled([(d, masks.get(i)) for i, d in enumerate(draws) if i not in failed]))
        return [failed[i] if i in failed else next(drawn) for i in range(len(draws))]

    def _mask(self, draw: Draw) -> torch.Tensor:
        """What may follow: bool [vocab]. Raises GrammarFailedError."""
        assert draw.follower is not None
        params = draw.params
        allowed = may_follow(
            draw.follower.allowed(draw.output_ids, self._vocab),
            eos_ids=self._eos,
            stop_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            too_short=len(draw.output_ids) < params.min_tokens,
        )
        return torch.from_numpy(allowed).to(self._logits.device)

    def _sampled(self, draws: list[tuple[Draw, torch.Tensor | None]]) -> list[Drawn]:
        last = {w.sequence: rows[-1] for w, rows in zip(self._work, self._rows, strict=True) if rows}
        states = [SamplingState(d.params, d.choice, d.prompt_ids, d.output_ids, self._eos, mask) for d, mask in draws]
        wanted = [last[d.sequence] for d, _ in draws]
        logits = self._logits if wanted == list(range(len(self._logits))) else self._logits[wanted]
        try:
            return [self._drawn(sampled) for sampled in sample(logits, states)]
        except Exception:
            return [self._draw_alone(logits[i : i + 1], state) for i, state in enumerate(states)]

    def _draw_alone(self, row: torch.Tensor, state: SamplingState) -> Drawn:
        try:
            (sampled,) = sample(row, [state])
        except Exception as error:
            traceback.print_exc()
            return Drawn(0, None, f"sampling failed: {type(error).__name__}: {error}")
        return self._drawn(sampled)

    def _drawn(self, sampled: Sampled) -> Drawn:
        """An id outside the vocabulary (of a distribution that is none) must not reach the next forward pass."""
        if not 0 <= sampled.token_id < self._vocab:
            return Drawn(0, None, f"sampling gave id {sampled.token_id}")
        return Drawn(sampled.token_id, sampled.logprob)
