"""One line to its result: through the same code as any request, in the batch lane."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from baton.errors import BatonError, Reason
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.batches.usage import NOTHING, Usage, read_usage
from services.frontend.embeddings.body import Inputs
from services.frontend.errors import error_object, internal, invalid
from services.frontend.lines import one_line
from services.frontend.respond import LONG_TOKENS, Prepared
from services.frontend.turn import NO_PLACE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)
"""What lines may ask for."""
TRIES = 5
"""Of a line that fails by no fault of its own. One that is refused for want of room does not count, as in the lane: its
body may find no place to be read."""
WAIT_S = (1.0, 60.0)
"""Between two tries: the first wait, and the longest."""
READS = 2
"""Bodies of lines that are read at the same time: there are others' to read."""

_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger()

Prepare = Callable[[str, bytes, str, str, float], Awaitable[Prepared]]
"""(endpoint, body, uid, tenant, seconds that it may take) to what can be started in the lane."""
Embed = Callable[[Inputs, str, float], Awaitable[bytes]]
"""(inputs, uid, seconds that it may take) to the body of the answer, in the lane."""


@dataclass(frozen=True)
class Answer:
    """A line of the output file, or of the error file."""

    ok: bool
    line: bytes
    outcome: str
    usage: Usage = NOTHING


class Answerer:
    """Answers lines."""

    def __init__(
        self, prepare: Prepare, read_inputs: Callable[[bytes], Awaitable[Inputs]], embed: Embed, metrics: BatchMetrics
    ) -> None:
        self._prepare = prepare
        self._read_inputs = read_inputs
        self._embed = embed
        self._metrics = metrics
        self._reads = asyncio.Semaphore(READS)

    async def answer(self, custom_id: str, endpoint: str, body: bytes, tenant: str, expires: float) -> Answer:
        """A tenant's line's result, whatever it is; `expires` is unix seconds. Cancelling stops the work for it."""
        (wait, longest), tries = WAIT_S, 0
        while True:
            request_id = f"req_{secrets.token_hex(12)}"
            try:
                timeout_s = max(1.0, expires - time.time())
                if endpoint == EMBEDDINGS:
                    answered, usage = await self._run_embeddings(body, timeout_s)
                else:
                    answered = await self._run(endpoint, body, tenant, timeout_s)
                    usage = read_usage(answered)
                line = line_of(custom_id, answered=(200, request_id, msgspec.Raw(answered)))
                return Answer(True, line, "ok", usage)
            except BatonError as error:
                failure = error
            except Exception:
                _log.exception("a line of a batch failed", custom_id=custom_id)
                failure = internal()
            tries += failure.reason not in NO_PLACE
            if not failure.reason.retryable or tries >= TRIES or time.time() >= expires:
                told = {"error": error_object(failure)}
                status = failure.reason.spec.http_status
                line = line_of(custom_id, answered=(status, request_id, msgspec.Raw(_encode(told))))
                return Answer(False, line, failure.reason.name.lower())
            self._metrics.retries.labels(failure.reason.name).inc()
            await asyncio.sleep(wait)
            wait = min(longest, wait * 2)

    async def _run_embeddings(self, body: bytes, timeout_s: float) -> tuple[bytes, Usage]:
        async with self._reads:
            inputs = await self._read_inputs(body)
        answered = await self._embed(inputs, f"emb-{secrets.token_hex(12)}", timeout_s)
        self._metrics.prompt_tokens.inc(inputs.tokens)
        return answered, Usage(inputs.tokens)

    async def _run(self, endpoint: str, body: bytes, tenant: str, timeout_s: float) -> bytes:
        async with self._reads:
            prepared = await self._prepare(endpoint, body, secrets.token_hex(12), tenant, timeout_s)
        call, format = prepared.call, prepared.format
        failed: Reason | None = Reason.ABORTED
        try:
            if prepared.stream:
                raise invalid("'stream' has no place in a batch.", "stream")
            await call.start()
            while True:
                for index, piece, prompt_logprobs in await call.pieces():
                    format.collect(index, piece, prompt_logprobs)
                if call.finished:
                    break
            failed = None
            usage = call.usage()
            self._metrics.prompt_tokens.inc(usage.prompt_tokens)
            self._metrics.output_tokens.inc(usage.completion_tokens)
            if usage.completion_tokens > LONG_TOKENS:
                return await asyncio.to_thread(format.body, usage, call.story())
            return format.body(usage, call.story())
        except BatonError as error:
            failed = error.reason
            raise
        finally:
            call.close(failed)


def line_of(
    custom_id: str, *, answered: tuple[int, str, msgspec.Raw] | None = None, error: tuple[str, str] | None = None
) -> bytes:
    """A line of a result file: what the request was `answered` (status, request id, body), or why it was not."""
    response: dict[str, Any] | None = None
    if answered is not None:
        status, request_id, body = answered
        response = {"status_code": status, "request_id": request_id, "body": body}
    told = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": None if error is None else {"code": error[0], "message": error[1]},
    }
    return one_line(_encode(told)) + b"\n"
