"""`baton explain`: ask the frontend where a prompt would run, and why."""

from __future__ import annotations

from typing import Any

import httpx

from baton.cli.api_key import authorization
from baton.cli.errors import CliError
from baton.cli.home import Home
from baton.cli.rpc import running

ANSWER_S = 15.0


def explain(home: Home, prompt: str, *, max_tokens: int, raw: bool) -> dict[str, Any]:
    """The answer of `POST /v1/baton/explain`: candidates with their terms in ms, and a summary. Raises CliError."""
    url = f"http://{running(home, 'frontend').address}"
    asked = {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    try:
        with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, headers=authorization()) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            reply = client.post("/v1/baton/explain", json={"model": model, "max_tokens": max_tokens, **asked})
            answer: dict[str, Any] = reply.json()
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise CliError(f"{url} does not answer: {error!r}", "see `baton status` and `baton logs frontend`") from error
    if "error" in answer:
        too_long = answer["error"].get("code") == "context_length_exceeded"
        hint = "give a shorter prompt, or fewer --max-tokens" if too_long else "--raw leaves the chat template out"
        raise CliError(answer["error"]["message"], hint)
    return answer
