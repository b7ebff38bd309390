"""The numbers of a step: from what the scheduler planned to logits, and from logits to drawn tokens."""

from __future__ import annotations

import traceback

import torch

from baton.engine.torch.batch import Batch, SequenceSlice
from baton.engine.torch.model import Model
from baton.engine.torch.sampler import Sampled, SamplingState, sample, token_logprobs
from baton.engine.torch.step import Draw, Drawn, Work


class Computation:
    """One step's logits, and which of their rows belong to whom. Creating it runs the model."""

    def __init__(self, model: Model, work: list[Work]) -> None:
        self._vocab = model.config.vocab
        self._eos = model.config.eos_token_ids
        self._work = work
        slices = [
            SequenceSlice(
                w.sequence.tokens[w.sequence.computed : w.sequence.computed + w.count],
                w.sequence.computed,
                w.sequence.slots,
                w.logits,
            )
            for w in work
        ]
        self._logits = model.forward(Batch(slices))
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

    def draw(self, draws: list[Draw]) -> list[Drawn]:
        """One token for each, in order. What one request's parameters break fails that request only."""
        if not draws:
            return []
        last = {w.sequence: rows[-1] for w, rows in zip(self._work, self._rows, strict=True) if rows}
        states = [SamplingState(d.params, d.choice, d.prompt_ids, d.output_ids, self._eos) for d in draws]
        wanted = [last[d.sequence] for d in draws]
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
