"""Programs in SGLang's front-end language, run by its own code: `python -m tests.sglang_language URL KEY`.

Prints one line of JSON with what came of each. Its packages need IPython, aiohttp and pybase64 only to be there: empty
ones stand in for them.
"""

from __future__ import annotations

import json
import math
import sys
import time
import types
from typing import Any

import requests

from tests.sglang_wheel import language

PROMPT = "The sea is wide and the ships are"
CHOICES = [" old", " very new and shiny", " gone"]


def main(url: str, key: str) -> None:
    """Everything in turn."""
    sgl, choices, runtime_endpoint = _import()
    backend = runtime_endpoint.RuntimeEndpoint(url, api_key=key)
    sgl.set_default_backend(backend)
    requests.sessions.Session.trust_env = False  # type: ignore[attr-defined]
    print(json.dumps(_run(sgl, choices, backend, url, key)))


def _import() -> tuple[Any, Any, Any]:
    language()
    for name, members in (
        ("IPython", ()),
        ("IPython.display", ("HTML", "display")),
        ("aiohttp", ("ClientTimeout", "ClientSession")),
        ("pybase64", ("b64encode", "b64decode")),
    ):
        if name not in sys.modules:
            stand_in = types.ModuleType(name)
            for member in members:
                setattr(stand_in, member, None)
            sys.modules[name] = stand_in
    import sglang.lang.api as sgl
    import sglang.lang.choices as choices
    from sglang.lang.backend import runtime_endpoint

    return sgl, choices, runtime_endpoint


def _run(sgl: Any, choices: Any, backend: Any, url: str, key: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @sgl.function
    def gen(s: Any, prompt: str, tokens: int = 12) -> None:
        s += prompt
        s += sgl.gen("answer", max_tokens=tokens, temperature=0.0, ignore_eos=True)

    state = gen.run(prompt=PROMPT)
    found["gen"] = {
        "prompt": PROMPT,
        "text": state.text(),
        "answer": state["answer"],
        "meta": state.get_meta_info("answer"),
    }

    # So many that they take some time: what comes while the client looks away is one piece.
    streamed = gen.run(prompt=PROMPT, tokens=400, stream=True)
    pieces = list(streamed.text_iter("answer"))
    found["stream"] = {"pieces": pieces, "whole": gen.run(prompt=PROMPT, tokens=400)["answer"]}

    @sgl.function
    def shaped(s: Any) -> None:
        s += "A date: " + sgl.gen("date", max_tokens=16, regex=r"[0-9]{4}-[0-9]{2}")
        s += "\nA number: " + sgl.gen("number", max_tokens=8, dtype=int, regex=None)
        s += "\nA flag: " + sgl.gen("flag", max_tokens=8, dtype=bool)
        schema = '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}'
        s += "\nAn object: " + sgl.gen("object", max_tokens=40, json_schema=schema)

    state = shaped.run()
    found["regex"] = {name: state[name] for name in ("date", "number", "flag", "object")}

    @sgl.function
    def select(s: Any, method: Any) -> None:
        s += PROMPT
        s += sgl.select("chosen", CHOICES, choices_method=method)

    found["select"] = {"choices": CHOICES, "expected": [_mean_logprob(url, key, choice) for choice in CHOICES]}
    for name, method in (
        ("token_length_normalized", choices.token_length_normalized),
        ("greedy_token_selection", choices.greedy_token_selection),
        ("unconditional", choices.unconditional_likelihood_normalized),
    ):
        state = select.run(method=method)
        meta = state.get_meta_info("chosen")
        found["select"][name] = {"chosen": state["chosen"], "scores": meta["normalized_prompt_logprobs"]}

    @sgl.function
    def forked(s: Any) -> None:
        s += PROMPT
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += f" number {i}:" + sgl.gen("answer", max_tokens=8, temperature=0.0, ignore_eos=True)
        s["forks"] = [
            {"text": fork.text(), "start": f"{PROMPT} number {i}:", "answer": fork["answer"]}
            for i, fork in enumerate(forks)
        ]

    state = forked.run()
    found["fork"] = state["forks"]

    prompts = [f"{PROMPT} {n}" for n in range(4)]
    together = gen.run_batch([{"prompt": prompt} for prompt in prompts], num_threads=4)
    found["batch"] = [state["answer"] for state in together]
    found["batch_alone"] = [gen.run(prompt=prompt)["answer"] for prompt in prompts]

    long = PROMPT * 8
    found["info"] = {"model": backend.model_info, "server": backend.get_server_info(), "before": 0}
    for _ in range(6):  # the router may need to hear of it first
        meta = gen.run(prompt=long).get_meta_info("answer")
        found["info"]["before"] = max(found["info"]["before"], meta["cached_tokens"])
    for _ in range(5):  # what the request before still holds is kept
        time.sleep(0.2)
        backend.flush_cache()
        found["info"]["after"] = gen.run(prompt=long).get_meta_info("answer")["cached_tokens"]
        if not found["info"]["after"]:
            break

    @sgl.function
    def wrong(s: Any) -> None:
        s += PROMPT + sgl.gen("answer", top_p=3.0)

    found["refused"] = str(wrong.run().error())
    return found


def _mean_logprob(url: str, key: str, choice: str) -> float:
    """The oracle: completions' echo of prompt and choice, over the choice's tokens."""
    body = {"model": "smollm2-135m-instruct", "prompt": PROMPT + choice, "max_tokens": 0, "echo": True, "logprobs": 0}
    headers = {"authorization": f"Bearer {key}"}
    answer = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json()
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    # SGLang scores from the last but one token of the prompt on.
    values = values[len(PROMPT.encode()) - 2 :]
    assert all(math.isfinite(value) for value in values)
    return sum(values) / len(values)


if __name__ == "__main__":
    main(*sys.argv[1:3])
