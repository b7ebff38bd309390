"""One request that runs in vLLM, from its start to its end there, whatever happens to who asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.inputs.engine import tokens_input

from baton.engine.port import FinishReason, TokenLogprob
from baton.errors import BatonError, Reason

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSampling
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(frozen=True)
class Delta:
    """What a step, or some, brought: a token that stops the choice is not among the tokens. `stopped_by` is that
    token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    cached_tokens: int
    stopped_by: int | None = None
    stop_logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class Stream:
    """`take` gets every delta, `failed` the error instead, at most once; nothing is called after `stop`."""

    def __init__(
        self,
        llm: AsyncLLM,
        prompt: list[int],
        params: VllmSampling,
        salt: str,
        job: int,
        take: Callable[[Delta], None],
        failed: Callable[[BatonError], None],
    ) -> None:
        self.job = job
        self.refused = False
        """Whether vLLM did not take it in at all."""
        self._llm = llm
        self._params = params
        self._take = take
        self._failed = failed
        self._stopped = False
        self._added = False
        self._task = asyncio.create_task(self._run(prompt, salt), name=f"vllm job {job}")

    def stop(self) -> None:
        """End it there. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        # A cancellation of one's own would be met by the abort. Before it is added the request is not to be lost there.
        if self._added and asyncio.current_task() is not self._task:
            self._task.cancel()

    async def _run(self, prompt: list[int], salt: str) -> None:
        try:
            await self._stream(prompt, salt)
        except BatonError as error:
            self._tell(error)
        except ValueError as error:
            self.refused = not self._added
            self._tell(BatonError(Reason.INVALID_REQUEST if self.refused else Reason.ENGINE_FAILED, str(error)))
        except Exception as error:
            self._tell(BatonError(Reason.ENGINE_FAILED, f"{type(error).__name__}: {error}"))

    def _tell(self, error: BatonError) -> None:
        if not self._stopped:
            self._failed(error)

    async def _stream(self, prompt: list[int], salt: str) -> None:
        queue = await self._llm.add_request(str(self.job), tokens_input(prompt, cache_salt=salt), self._params)
        self._added = True
        finished = False
        try:
            while not finished and not self._stopped:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                self._take(_delta(output, self._params.logprobs, self._params.prompt_logprobs))
        finally:
            if not finished:
                await self._llm.abort(queue.request_id, internal=True)


def _delta(output: Any, logprobs: int | None, prompt_logprobs: int | None) -> Delta:
    (completion,) = output.outputs
    ids = tuple(completion.token_ids)
    told = tuple(
        _logprob(token, at, logprobs or 0) for token, at in zip(ids, completion.logprobs or (), strict=bool(logprobs))
    )
    if completion.finish_reason not in (None, "stop", "length"):
        raise BatonError(Reason.ENGINE_FAILED, f"vLLM ended the request with {completion.finish_reason!r}")
    stops = completion.finish_reason == "stop"
    prompt = output.prompt_logprobs if prompt_logprobs is not None else None
    return Delta(
        token_ids=ids[:-1] if stops else ids,
        logprobs=told[:-1] if stops else told,
        finish=FinishReason(completion.finish_reason) if completion.finish_reason else None,
        cached_tokens=output.num_cached_tokens or 0,
        stopped_by=ids[-1] if stops else None,
        stop_logprob=told[-1] if stops and told else None,
        prompt_logprobs=_prompt(output.prompt_token_ids, prompt, prompt_logprobs or 0),
    )


def _logprob(token: int, at: dict[int, Any], count: int) -> TokenLogprob:
    best = sorted((entry.rank, id, entry.logprob) for id, entry in at.items() if entry.rank <= count)
    return TokenLogprob(token, at[token].logprob, tuple((id, value) for _, id, value in best[:count]))


def _prompt(ids: list[int], at: list[dict[int, Any] | None] | None, count: int) -> tuple[TokenLogprob | None, ...]:
    if not at:
        return ()
    return tuple(None if entry is None else _logprob(id, entry, count) for id, entry in zip(ids, at, strict=True))
