"""`/generate`, `/get_model_info`, `/get_server_info`, `/health_generate`, `/flush_cache`."""

from __future__ import annotations

import asyncio
import secrets
import time
from importlib.metadata import version
from typing import Any

import grpc
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from baton.errors import BatonError, Reason
from baton.v1 import registry_pb2, worker_pb2
from services.frontend.api_keys import tenant_of
from services.frontend.asked import Api, Asked
from services.frontend.call import Ask, Call, ends
from services.frontend.detokenise import Show
from services.frontend.frontend import Frontend
from services.frontend.receiving import Receive, read_as
from services.frontend.respond import CompletionResponse, Job, Prepared
from services.frontend.sampling import make_sampling, output_budget
from services.frontend.schema import UNASKED
from services.frontend.sglang import PATH
from services.frontend.sglang.body import DEFAULT_TOKENS, blamed, read_told
from services.frontend.sglang.format import GenerateFormat, Wish

HEALTH_S = 20.0
FLUSH_S = 10.0


def add_sglang(app: FastAPI, frontend: Frontend, receive: Receive) -> None:
    """The routes. Both spellings of the information are known: clients of several years are about."""
    started, release = time.time(), version("baton")

    async def generate(request: Request) -> Response:
        return await _generate(request, frontend, receive)

    async def model_info(_: Request) -> Response:
        return JSONResponse(_model_info(frontend))

    async def server_info(_: Request) -> Response:
        told = {"version": release, "startup_time": started, "max_total_num_tokens": None, "internal_states": []}
        return JSONResponse(_model_info(frontend) | told | {"context_length": frontend.context_length()})

    async def health_generate(_: Request) -> Response:
        await _one_token(frontend)
        return PlainTextResponse("")

    async def flush_cache(_: Request) -> Response:
        count = await _flush(frontend)
        return PlainTextResponse(f"Cache flushed on {count} workers.\n")

    app.add_route(PATH, generate, ["POST", "PUT"])
    for path in ("/get_model_info", "/model_info"):
        app.add_route(path, model_info, ["GET"])
    for path in ("/get_server_info", "/server_info"):
        app.add_route(path, server_info, ["GET"])
    app.add_route("/health_generate", health_generate, ["GET"])
    app.add_route("/flush_cache", flush_cache, ["GET", "POST"])


def _model_info(frontend: Frontend) -> dict[str, Any]:
    name = frontend.model.name
    return {
        "model_path": name,
        "served_model_name": name,
        "tokenizer_path": name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


async def _generate(request: Request, frontend: Frontend, receive: Receive) -> Response:
    entered, body = await receive(request, frontend, "generate")
    uid = secrets.token_hex(12)

    async def prepare() -> Prepared:
        begun = time.time()
        try:
            asked = await read_as(frontend, body, Api.GENERATE, tenant=tenant_of(request))
            return _prepared(frontend, asked, uid, begun + frontend.request_timeout_s)
        except BatonError as error:
            raise blamed(error) from error
        finally:
            body.clear()
            entered.body_read()

    job = Job(uid, "generate", prepare, entered.leave)
    return CompletionResponse(job, frontend.metrics, frontend.requests, frontend.client_stall_s)


def _prepared(frontend: Frontend, asked: Asked, uid: str, deadline: float) -> Prepared:
    """A call with an ask for each prompt, under its own options."""
    told, limit = read_told(asked.told), frontend.context_length()
    asks, wishes = [], []
    for prompt, (options, grammar), start in zip(asked.prompts, asked.each, told.starts, strict=True):
        if start > len(prompt.ids):
            raise BatonError(
                Reason.INVALID_REQUEST, "'logprob_start_len' is behind the prompt.", param="logprob_start_len"
            )
        budget = output_budget(options, len(prompt.ids), limit, DEFAULT_TOKENS, "text" if prompt.text else "input_ids")
        defaults, scored = frontend.model.generation, start >= 0
        sampling = make_sampling(options, defaults, budget, prompt_logprobs=scored, grammar=grammar)
        show = Show(options.show_special, options.include_stop, ids=True)
        asks.append(Ask(prompt, sampling, budget, options.stop, show, merged_only=scored))
        wishes.append(Wish(prompt.ids, options.logprobs, start, ends(sampling, frontend.backend.eos_ids)))
    n = asked.options.n
    call = Call(uid, asks, n, deadline, frontend.model.tokenizer, frontend.backend)
    format = GenerateFormat(uid, told, wishes, n, frontend.model.tokenizer, call.cached)
    return Prepared(call, format, asked.options.stream, include_usage=False)


async def _one_token(frontend: Frontend) -> None:
    """Let the model say one token. Raises BatonError when it does not, or not in time."""
    entered = frontend.gate.enter()
    prompt = frontend.backend.prompts.ids([0], frontend.context_length(), spelled=False)
    sampling = make_sampling(UNASKED, frontend.model.generation, 1, prompt_logprobs=False)
    deadline = time.time() + HEALTH_S
    ask = Ask(prompt, sampling, 1, ())
    call = Call(f"health-{secrets.token_hex(8)}", [ask], 1, deadline, frontend.model.tokenizer, frontend.backend)
    try:
        async with asyncio.timeout(HEALTH_S):
            await call.start()
            while not call.finished:
                await call.pieces()
    except TimeoutError:
        raise BatonError(Reason.DEADLINE_EXCEEDED, f"No token came in {HEALTH_S:g} s.") from None
    finally:
        call.close()
        entered.leave()


async def _flush(frontend: Frontend) -> int:
    """Every worker of the model forgets the prefixes that nobody uses now; how many did. Stores keep what they have.

    Raises BatonError(DECODE_UNAVAILABLE) naming those that did not answer.
    """
    workers = frontend.readiness.workers()

    async def flush(worker: registry_pb2.Worker) -> str:
        try:
            await frontend.backend.sessions.stub(worker.address).ClearCache(
                worker_pb2.ClearCacheRequest(), timeout=FLUSH_S
            )
        except grpc.aio.AioRpcError as error:
            return f"{worker.id} ({error.code().name})"
        return ""

    failed = [name for name in await asyncio.gather(*(flush(worker) for worker in workers)) if name]
    if failed:
        raise BatonError(Reason.DECODE_UNAVAILABLE, f"Not every worker flushed its cache: {', '.join(failed)}.")
    return len(workers)
