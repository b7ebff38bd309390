"""From logits to tokens: penalties and masks, then temperature, top-k, top-p, min-p, then one draw.

The order: log-probabilities are taken from the logits as they come; then `logit_bias`, repetition penalty (prompt and
output), presence and frequency penalty (output), the mask on ends until `min_tokens`, the grammar's mask; then
temperature, and top-k, top-p (of what top-k left) and min-p, each as a threshold: tokens that tie with the last one
kept are kept. The draw is a race among what is kept: token t arrives after Exp(1) / weight(t), and the first one wins,
which is t with the probability of its weight (equal to the largest logit plus Gumbel noise: Gumbel 1954; Maddison et
al., A* sampling, 2014). The noise is counter-based: it depends on the request's seed, choice, output index and the
token, and not on the batch. Rounding changes a draw only where the two first arrive together, as with greedy; inverting
the cumulative distribution has a border at every token (measured, logits moved by 1e-5: 25 draws of 2000 change there,
none here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.port import SamplingParams, TokenLogprob
from baton.engine.torch.noise import uniforms
from baton.errors import BatonError, Reason

CUTS = (-3.0, -6.0, -10.0, -16.0)
"""For top-p: how far below the most likely token candidates are looked for, in turn, before all tokens are sorted.
Sorting a vocabulary of 50,000 takes 3 ms; the few hundred tokens that matter, a fiftieth of that."""


@dataclass(frozen=True)
class SamplingState:
    """What one draw depends on besides its logits. `output_ids` are all output tokens so far, resumed ones included.

    `mask`: the tokens a grammar allows, bool [vocab], or None. It has the rules on ends in it: `min_tokens` does not
    count beside it.
    """

    params: SamplingParams
    choice: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    eos_token_ids: Sequence[int] = ()
    mask: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """A drawn token, with its log-probability when the request wanted it."""

    token_id: int
    logprob: TokenLogprob | None = None


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
    """Draw one token for each row of `logits` [rows, vocab] (float32, not changed).

    Raises BatonError(ENGINE_FAILED) when a row is no distribution: NaN in it, or every token masked.
    """
    if not states:
        return []
    with torch.inference_mode():
        adjusted = _adjusted(logits, states)
        best = adjusted.max(-1)
        if not best.values.isfinite().all():
            raise BatonError(Reason.ENGINE_FAILED, "the logits are not numbers, or every token is masked")
        tokens: list[int] = best.indices.tolist()
        drawing = [row for row, state in enumerate(states) if state.params.temperature > 0]
        if drawing:
            some = slice(None) if len(drawing) == len(states) else drawing
            drawn = _draw(adjusted[some], best.values[some], [states[row] for row in drawing])
            for row, token in zip(drawing, drawn, strict=True):
                tokens[row] = token
    logprobs = token_logprobs(logits, tokens, [state.params.logprobs for state in states])
    return [Sampled(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]


def token_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int | None]) -> list[TokenLogprob | None]:
    """The log-probability of `token_ids[i]` in row i with those of the `counts[i]` most likely; None: not wanted."""
    found: list[TokenLogprob | None] = [None] * len(token_ids)
    wanted = [row for row, count in enumerate(counts) if count is not None]
    if not wanted:
        return found
    with torch.inference_mode():
        rows = torch.log_softmax(logits[wanted], -1)
        chosen = torch.tensor([[token_ids[row]] for row in wanted], device=rows.device)
        own = rows.gather(1, chosen).flatten().tolist()
        values, ids = rows.topk(min(max(counts[row] or 0 for row in wanted), rows.shape[-1]), -1)
    for row, logprob, best_ids, best in zip(wanted, own, ids.tolist(), values.tolist(), strict=True):
        top = tuple(zip(best_ids, best, strict=True))[: counts[row]]
        found[row] = TokenLogprob(token_ids[row], logprob, top)
    return found


def _adjusted(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """The logits after bias, penalties and masks; the same tensor when no row has any."""
    changed = logits
    for row, state in enumerate(states):
        if _is_plain(state):
            continue
        if changed is logits:
            changed = logits.clone()
        _adjust(changed[row], state)
    return changed


def _is_plain(state: SamplingState) -> bool:
    p = state.params
    penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    return not (p.logit_bias or penalties or state.mask is not None or len(state.output_ids) < p.min_tokens)


def _adjust(row: Tensor, state: SamplingState) -> None:
    params, device = state.params, row.device
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=device)
        row[torch.tensor(list(params.logit_bias), device=device)] += bias
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted({*state.prompt_ids, *state.output_ids}), dtype=torch.long, device=device)
        values = row[ids]
        row[ids] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and state.output_ids:
        unique, counts = np.unique(state.output_ids, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        row[torch.tensor(unique, device=device)] -= torch.tensor(penalty, dtype=row.dtype, device=device)
    if state.mask is None and len(state.output_ids) < params.min_tokens:
        ends = [*state.eos_token_ids, *params.stop_token_ids]
        row[torch.tensor(ends, dtype=torch.long, device=device)] = float("-inf")
    if state.mask is not None:
        row.masked_fill_(~state.mask, float("-inf"))


def _draw(logits: Tensor, best: Tensor, states: Sequence[SamplingState]) -> list[int]:
    """One token a row from the filtered distribution at each row's temperature; `best` is each row's largest logit."""
    # A temperature that float32 has no normal number for would divide by zero.
    least = torch.finfo(torch.float32).tiny
    temperature = torch.tensor([[max(s.params.temperature, least)] for s in states], device=logits.device)
    # The most likely token at 0: nothing overflows, however small the temperature.
    x = (logits - best[:, None]) / temperature
    weights = x.exp()
    return [_first(x[row], weights[row], state) for row, state in enumerate(states)]


def _first(x: Tensor, weights: Tensor, state: SamplingState) -> int:
    """Who wins the race of one row, -log(1 - u) / weight being the time of a token.

    u is never more than -log(1 - u), so only those need a logarithm whose u / weight is not beyond the time of the
    one that this puts first.
    """
    threshold = _threshold(x, weights, state.params)
    if threshold is None:
        tokens = torch.arange(len(weights), device=weights.device)
        weight = weights.to(torch.float64)
    else:
        tokens = (x >= threshold).nonzero()[:, 0]
        weight = weights[tokens].to(torch.float64)
    u = uniforms(state.params.seed, state.choice, len(state.output_ids), tokens)
    soonest = u / weight
    favourite = soonest.argmin()
    near = (soonest <= -torch.log1p(-u[favourite]) / weight[favourite]).nonzero()[:, 0]
    return int(tokens[near[(-torch.log1p(-u[near]) / weight[near]).argmin()]])


def _threshold(row: Tensor, weights: Tensor, params: SamplingParams) -> Tensor | None:
    """The smallest kept value of one row (most likely token at 0), or None when all are kept."""
    lowest: Tensor | None = None
    if 0 < params.top_k < row.shape[0]:
        lowest = row.topk(params.top_k).values[-1]
    if params.top_p < 1:
        kept = weights if lowest is None else weights * (row >= lowest)
        reached = _top_p_threshold(row, kept.sum(dtype=torch.float64) * params.top_p)
        lowest = reached if lowest is None else torch.maximum(lowest, reached)
    if params.min_p > 0:
        reached = row.new_tensor(params.min_p).log()
        lowest = reached if lowest is None else torch.maximum(lowest, reached)
    return lowest


def _top_p_threshold(row: Tensor, goal: Tensor) -> Tensor:
    """The value of the token at which the weights of the most likely ones reach `goal`."""
    for cut in (*CUTS, float("-inf")):
        candidates = row[row > cut]
        if cut == float("-inf") or candidates.exp().sum(dtype=torch.float64) > goal:
            break
    best = candidates.sort(descending=True).values
    reached = int(torch.searchsorted(best.exp().cumsum(0, dtype=torch.float64), goal))
    return best[min(reached, len(best) - 1)]
