"""Our sampler inside vLLM: one logits processor that draws each request's token and leaves vLLM no choice.

vLLM's own sampling cannot be resumed: its noise is a generator's state, its penalties know only the output of one run,
and so on. So every request is greedy for vLLM, and what the request asks for is done here by the sampler of the torch
engine (`baton/engine/torch/sampler.py`): the drawn token's logit is the only one left. Noise depends on the seed, the
choice and the output index alone, and output that an earlier attempt (or the prefill side) has drawn counts as output
although it is prompt to vLLM. Log-probabilities vLLM takes from the logits as they were before.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from baton.engine.port import SamplingParams
from baton.engine.torch.sampler import SamplingState, sample

ARGUMENT = "baton"
"""Key of `extra_args`: what `Draw` says, as bytes."""


class Draw(msgspec.Struct, array_like=True):
    """How one choice's tokens are drawn. `prompt_tokens` of what vLLM takes for the prompt are prompt; the rest of it
    is output that was drawn before."""

    job: int
    choice: int
    prompt_tokens: int
    params: SamplingParams
    eos_token_ids: tuple[int, ...]

    def encode(self) -> bytes:
        """As an argument of a request."""
        return msgspec.msgpack.encode(self)


class _Row:
    """One request of vLLM's batch. `output` is vLLM's own list, which grows."""

    def __init__(self, draw: Draw, prompt: Sequence[int], output: list[int]) -> None:
        self.draw = draw
        self._prompt = list(prompt[: draw.prompt_tokens])
        self._before = list(prompt[draw.prompt_tokens :])
        self._output = output
        p = draw.params
        penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
        self._always = bool(p.temperature > 0 or p.logit_bias or penalties)

    @property
    def ours(self) -> bool:
        """Whether there is more to do than to take the most likely token."""
        return self._always or len(self._before) + len(self._output) < self.draw.params.min_tokens

    def state(self) -> SamplingState:
        d = self.draw
        return SamplingState(d.params, d.choice, self._prompt, [*self._before, *self._output], d.eos_token_ids)


class BatonSampler(LogitsProcessor):
    """Follows vLLM's batch row by row. A row that is no distribution ends its own request only."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        self._decoder = msgspec.msgpack.Decoder(Draw)

    def is_argmax_invariant(self) -> bool:
        """No: bias, penalties and noise all change which token is first."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Rows come, go and move; in vLLM's order."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._rows.pop(index, None)
            encoded = (params.extra_args or {}).get(ARGUMENT)
            if encoded is not None:
                self._rows[index] = _Row(self._decoder.decode(encoded), prompt or (), output)
        for a, b, direction in batch_update.moved:
            moved, other = self._rows.pop(a, None), self._rows.pop(b, None)
            if moved is not None:
                self._rows[b] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[a] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one token in every row that asks for more than the most likely one."""
        self._check_plain(logits)
        rows = {index: row for index, row in self._rows.items() if row.ours and index < len(logits)}
        if not rows:
            return logits
        indices = list(rows)
        states = [row.state() for row in rows.values()]
        try:
            drawn = [sampled.token_id for sampled in sample(logits[indices], states)]
        except Exception:
            drawn = [self._alone(logits[index], rows[index]) for index in indices]
        logits[indices] = float("-inf")
        logits[indices, drawn] = 0.0
        return logits

    def _check_plain(self, logits: torch.Tensor) -> None:
        """Rows that are left to vLLM: the most likely of what are no numbers would be told as text."""
        plain = [index for index, row in self._rows.items() if not row.ours and index < len(logits)]
        if not plain:
            return
        # amax of all rows, not max of these: it keeps NaN as well, and 8 rows of 49,152 take 0.07 ms instead of 0.85.
        highest = logits.amax(-1).tolist()
        for index in plain:
            if not math.isfinite(highest[index]):
                get_kv_transfer_group().broken(self._rows[index].draw.job, "the logits are not numbers")

    def _alone(self, logits: torch.Tensor, row: _Row) -> int:
        try:
            return sample(logits[None], [row.state()])[0].token_id
        except Exception as error:
            traceback.print_exc()
            get_kv_transfer_group().broken(row.draw.job, f"sampling failed: {type(error).__name__}: {error}")
            return 0
