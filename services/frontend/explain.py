"""`POST /v1/baton/explain`: where a request would run, and why, with nothing started and nothing reserved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from baton.kv.keys import KEY_BYTES
from baton.v1 import router_pb2, worker_pb2
from services.frontend.request import Backend, Work

ANSWER_S = 5.0


async def explain(backend: Backend, work: Work) -> dict[str, Any]:
    """Every candidate for `work` with its terms in milliseconds, the plan, and a line that sums it up.

    Raises BatonError: ROUTER_UNAVAILABLE.
    """
    request = router_pb2.RouteRequest(
        uid=work.uid,
        model=backend.card.model,
        tenant=work.prompt.tenant,
        prompt_tokens=len(work.prompt.ids),
        max_tokens=work.sampling.max_tokens,
        packed_keys=b"".join(work.prompt.keys),
        deadline=min(work.deadline, time.time() + ANSWER_S),
        ttft_slo_s=backend.ttft_slo_s,
        fallback=backend.fallback,
        merged_only=work.merged_only,
        needs=work.needs,
    )
    return told(request, await backend.router.explain(request))


def told(request: router_pb2.RouteRequest, reply: router_pb2.ExplainReply) -> dict[str, Any]:
    """A router's explanation as JSON. `terms_ms` of each candidate, the largest first; they sum to `total_ms`.
    `excluded_stores`: those that nothing is loaded from, whatever they hold."""
    return {
        "object": "baton.explanation",
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "blocks": len(request.packed_keys) // KEY_BYTES,
        "summary": _summary(reply),
        "candidates": _candidates(reply.candidates),
        "excluded_stores": [{"store": one.store.id, "why": one.why} for one in reply.excluded_stores],
    }


def _summary(reply: router_pb2.ExplainReply) -> str:
    if reply.HasField("failure"):
        return f"{reply.failure.reason}: {reply.failure.message}"
    plan = reply.plan
    via = f"prefill on {plan.prefill.id}, " if plan.prefill.id else ""
    return f"{_mode(plan.mode)}: {via}streaming from {plan.worker.id} ({', '.join(plan.reasons)})"


def _candidates(found: Sequence[router_pb2.Candidate]) -> list[dict[str, Any]]:
    return [
        {
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
            "store_tier": one.store_tier,
        }
        for one in found
    ]


def _mode(mode: worker_pb2.Mode.ValueType) -> str:
    return worker_pb2.Mode.Name(mode).removeprefix("MODE_").lower()
