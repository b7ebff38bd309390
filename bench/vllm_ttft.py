"""The first token of a handed-over prompt: Baton's prefill and decode beside vLLM's own pair over its NixlConnector.

vLLM's pair is driven as its own proxy does it: one request with `max_tokens` 1 to prefill, whose answer says where the
KV lies, then the same prompt with that to decode. The proxy is this client, so its hop costs vLLM nothing. Time counts
from sending the first request to the first text of the second. Prompts alternate between the two, none seen before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import httpx
from rich.console import Console

from bench.balance import words
from bench.load import TIMEOUT_S, Answer, quantile, stream
from bench.run import Run
from bench.vllm_server import NAME

PROMPT = 1000
TOKENS = 4
WARM = 3
TOLD = 5
"""How often something is said of how far it is."""
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def through_connector(
    prefill: httpx.AsyncClient, decode: httpx.AsyncClient, prompt: Sequence[int], tokens: int
) -> Answer:
    """One prompt through vLLM's pair; `sent` is when prefill was asked."""
    answer = Answer()
    began = time.perf_counter()
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "kv_transfer_params": ASKED}
    try:
        first = await prefill.post("/v1/completions", json=body, timeout=TIMEOUT_S)
        handed = first.raise_for_status().json().get("kv_transfer_params")
    except httpx.HTTPError as error:
        answer.error = repr(error)
        return answer
    if not handed:
        answer.error = "prefill handed nothing over"
        return answer
    await stream(decode, NAME, prompt, tokens, answer, kv_transfer_params=handed)
    answer.sent = began
    return answer


async def compare(console: Console, baton: Run, pair: tuple[str, str], count: int) -> dict[str, object]:
    """`count` prompts each, in turn. Raises RuntimeError when one fails or was not handed over."""
    ours: list[Answer] = []
    theirs: list[Answer] = []
    async with (
        httpx.AsyncClient(base_url=baton.url, trust_env=False) as frontend,
        httpx.AsyncClient(base_url=pair[0], trust_env=False) as prefill,
        httpx.AsyncClient(base_url=pair[1], trust_env=False) as decode,
    ):
        for number in range(WARM + count):
            answer = Answer()
            await stream(frontend, baton.model, words(PROMPT), TOKENS, answer)
            other = await through_connector(prefill, decode, words(PROMPT), TOKENS)
            if wrong := _wrong(answer, other):
                raise RuntimeError(wrong)
            if number < WARM:
                continue
            ours.append(answer)
            theirs.append(other)
            if len(ours) % TOLD == 0:
                said = f"Baton {_p50(ours) * 1e3:.0f} ms, NixlConnector {_p50(theirs) * 1e3:.0f} ms"
                console.print(f"  first token, {len(ours)}/{count} prompts: {said}", style="dim")
            await asyncio.sleep(0)
    return {
        "ttft_over_nixlconnector": round(_p50(ours) / _p50(theirs), 3),
        "ttft_ms": {"baton": round(_p50(ours) * 1e3, 1), "nixlconnector": round(_p50(theirs) * 1e3, 1)},
        "ttft_prompts": count,
    }


def _p50(answers: list[Answer]) -> float:
    return quantile([answer.ttft for answer in answers], 0.5)


def _wrong(ours: Answer, theirs: Answer) -> str:
    if ours.error or theirs.error:
        return f"a prompt failed: {ours.error or theirs.error}"
    mode = str(ours.story.get("mode", ""))
    return "" if mode == "disaggregated" else f"a prompt was not handed over but ran {mode or 'somehow'}: {ours.story}"
