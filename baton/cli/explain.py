"""`baton explain`: tokenise a prompt as the frontend would, and ask the router where it would run and why."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

from baton.cli.errors import CliError
from baton.cli.fetch import DEFAULT_MODEL
from baton.cli.home import Home
from baton.cli.rpc import ask, running
from baton.errors import BatonError
from baton.kv.keys import block_keys
from baton.model.card import load_model
from baton.model.errors import ModelError
from baton.v1 import router_pb2, router_pb2_grpc, worker_pb2

ANSWER_S = 10.0


def explain(home: Home, prompt: str, *, max_tokens: int, raw: bool) -> dict[str, Any]:
    """Every candidate with its terms in milliseconds, the plan, and a line that sums it up. Raises CliError."""
    router = running(home, "router")
    request = _request(home, prompt, max_tokens, raw)
    reply = ask(
        router.address,
        lambda channel: router_pb2_grpc.RouterServiceStub(channel).Explain(request, timeout=ANSWER_S),
    )
    plan = reply.plan
    if reply.HasField("failure"):
        summary = f"{reply.failure.reason}: {reply.failure.message}"
    else:
        via = f"prefill on {plan.prefill.id}, " if plan.prefill.id else ""
        reasons = ", ".join(plan.reasons)
        summary = f"{_mode(plan.mode)}: {via}streaming from {plan.worker.id} ({reasons})"
    return {
        "prompt_tokens": request.prompt_tokens,
        "blocks": len(request.keys),
        "summary": summary,
        "candidates": [_candidate(one) for one in reply.candidates],
    }


def _request(home: Home, prompt: str, max_tokens: int, raw: bool) -> router_pb2.RouteRequest:
    path, served_name = _model(home)
    try:
        model = load_model(path, served_name)
        text = prompt if raw else model.template.render([{"role": "user", "content": prompt}])
    except (ModelError, BatonError) as error:
        hint = "give --raw to take the text as it is" if isinstance(error, BatonError) else "run `baton down`, then up"
        raise CliError(str(error), hint) from error
    tokens = model.tokenizer.encode(text, add_special=raw)
    return router_pb2.RouteRequest(
        uid=f"explain-{uuid.uuid4().hex[:12]}",
        model=model.name,
        prompt_tokens=len(tokens),
        max_tokens=max_tokens,
        keys=block_keys(model.key_root(), tokens),
        deadline=time.time() + ANSWER_S,
    )


def _model(home: Home) -> tuple[Path, str]:
    """The model of the run and the name it is served under ("" from the file)."""
    try:
        options = json.loads((home.run / "up.json").read_text())
    except (OSError, ValueError) as error:
        raise CliError("it is not known which model runs here", "start with `baton up`") from error
    return Path(options["model"] or home.models / f"{DEFAULT_MODEL}.gguf"), options["served_name"]


def _candidate(one: router_pb2.Candidate) -> dict[str, Any]:
    return {
        "mode": _mode(one.mode),
        "worker": one.worker,
        "prefill": one.prefill,
        "total_ms": one.total_ms,
        "terms_ms": dict(sorted(one.terms_ms.items(), key=lambda item: -item[1])),
        "cached_tokens": one.cached_tokens,
        "chosen": one.chosen,
        "excluded": one.excluded,
        "transport": one.transport,
        "store": one.store,
        "stored_tokens": one.stored_tokens,
    }


def _mode(mode: worker_pb2.Mode.ValueType) -> str:
    return worker_pb2.Mode.Name(mode).removeprefix("MODE_").lower()
