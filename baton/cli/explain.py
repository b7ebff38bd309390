"""`baton explain`: ask the frontend where a prompt would run, and why."""

from __future__ import annotations

from typing import Any

import httpx

from baton.cli.api_key import authorization
from baton.cli.errors import CliError
from baton.cli.home import Home
from baton.cli.rpc import running

ANSWER_S = 15.0
_SEE = "see `baton status` and `baton logs frontend`"


def explain(home: Home, prompt: str, *, max_tokens: int, raw: bool) -> dict[str, Any]:
    """The answer of `POST /v1/baton/explain`: candidates with their terms in ms, and a summary. Raises CliError."""
    url = f"http://{running(home, 'frontend').address}"
    asked = {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    try:
        with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, headers=authorization()) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            reply = client.post("/v1/baton/explain", json={"model": model, "max_tokens": max_tokens, **asked})
            answer: dict[str, Any] = reply.json()
    except httpx.HTTPStatusError as error:
        hint = "BATON_API_KEYS_FILE names the file of its keys" if error.response.status_code == 401 else _SEE
        raise CliError(f"{url} answers {error.response.status_code}: {error.response.text[:200]}", hint) from error
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise CliError(f"{url} does not answer: {error!r}", _SEE) from error
    if "error" in answer:
        if answer["error"].get("code") == "context_length_exceeded":
            hint = "give a shorter prompt, or fewer --max-tokens"
        else:
            hint = "--raw leaves the chat template out" if reply.status_code == 400 and not raw else _SEE
        raise CliError(answer["error"]["message"], hint)
    return answer
