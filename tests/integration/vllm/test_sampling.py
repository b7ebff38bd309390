"""Our logits processor in vLLM's own interpreter: rows that are no numbers end their own request, and no other."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.vllm_environment import vllm_python

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import json
import torch
from types import SimpleNamespace
from vllm import SamplingParams as VllmParams
from baton.engine.port import SamplingParams
from baton.engine.vllm import sampling

told = []
sampling.get_kv_transfer_group = lambda: SimpleNamespace(broken=lambda job, why: told.append([job, why]))
sampler = sampling.BatonSampler(None, torch.device("cpu"), False)
rows = [SamplingParams(max_tokens=8, seed=3, temperature=heat) for heat in (0.0, 0.0, 0.0, 0.0, 1.0, 1.0)]
added = []
for job, params in enumerate(rows):
    draw = sampling.Draw(job=job, choice=0, prompt_tokens=2, params=params, eos_token_ids=(9,))
    added.append((job, VllmParams(extra_args={sampling.ARGUMENT: draw.encode()}), [1, 2], []))
sampler.update_state(SimpleNamespace(removed=[], added=added, moved=[]))
logits = torch.arange(6 * 20, dtype=torch.float32).view(6, 20) / 10
logits[1, 7] = float("nan")
logits[2, 7] = float("inf")
logits[3] = float("-inf")
logits[4, 7] = float("nan")
left = sampler.apply(logits)
print(json.dumps({"told": told, "first": int(left[0].argmax()), "drawn": int(left[5].isfinite().sum())}))
"""


def test_rows_that_are_no_numbers() -> None:
    """NaN, infinity and nothing but minus infinity, greedy and drawn; the rows beside them get their token."""
    ended = subprocess.run([str(vllm_python()), "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=True)
    said = json.loads(ended.stdout.splitlines()[-1])
    assert sorted(job for job, _ in said["told"]) == [1, 2, 3, 4]
    assert all("not numbers" in why for _, why in said["told"])
    assert (said["first"], said["drawn"]) == (19, 1)
