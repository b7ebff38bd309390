"""From a request of ours to requests of vLLM's, one for each choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm import SamplingParams as VllmSampling
from vllm.sampling_params import RequestOutputKind

from baton.engine.port import Request
from baton.engine.vllm.plan import JOB, PARENT, READY, SAVES, SLOTS
from baton.engine.vllm.sampling import ARGUMENT, Draw


def stops(request: Request, eos_token_ids: tuple[int, ...]) -> list[int]:
    """Tokens that end a choice."""
    params = request.sampling
    return sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})


def sampling(
    request: Request,
    choice: int,
    *,
    job: int,
    drawn: int,
    tokens: int | None,
    most: int,
    slots: list[int],
    ready: int,
    saves: bool,
    parent: bytes,
    eos_token_ids: tuple[int, ...],
) -> VllmSampling:
    """What vLLM is asked for one choice, of whose output `drawn` tokens are in its prompt already.

    `tokens`: how many to generate, None for what the budget leaves; then `most` (up to the context's end) at most. To
    vLLM every request is greedy, without a minimum: the rest is drawn by `BatonSampler`. `parent` is the key of the
    block in the last of `slots`, or the root.
    """
    params = request.sampling
    arguments: dict[str, Any] = {
        "kv_transfer_params": {JOB: job, SLOTS: slots, READY: ready, SAVES: saves, PARENT: parent},
        ARGUMENT: Draw(
            job, choice, len(request.prompt_ids), replace(params, stop_token_ids=tuple(params.stop_token_ids)),
            eos_token_ids,
        ).encode(),
    }  # fmt: skip
    return VllmSampling(
        temperature=0.0,
        max_tokens=tokens if tokens is not None else min(params.max_tokens - drawn, most),
        stop_token_ids=stops(request, eos_token_ids),
        ignore_eos=True,  # ends are named above; vLLM's own idea of them may differ
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs if drawn == len(request.emitted_ids) and tokens == 1 else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=arguments,
    )
