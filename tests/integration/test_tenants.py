"""Tenants on real processes: nobody finds another's KV, what another keeps, or room in the store that is another's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.stack import HANG_S, SERVED, Stack, until
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

KEYS = {
    "acme": "sk-acme-0123456789",
    "big": "sk-big-0123456789",
    "small": "sk-small-0123456789",
    "": "sk-plain-0123456",
}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 32 * 4
"""Of the tiny model: layers, keys and values, heads, numbers of each, tokens, bytes."""
SMALL_BLOCKS = 4
PROMPT = "All work and no play makes Jack a dull boy. " * 8
TOKENS = 8


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One merged worker, a store with a quota for one tenant, a frontend with files."""
    directory = tmp_path_factory.mktemp("tenants")
    keys = directory / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
    run = Stack(
        directory,
        make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=2),
        prefill=0,
        decode=0,
        http={"api_keys_file": keys, "batch_dir": directory / "files"},
        store={"quota": f"small={SMALL_BLOCKS * BLOCK_BYTES / 2**30:.14f}"},
    )
    run.start()
    yield run
    run.teardown()


def client(stack: Stack, tenant: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.Client(base_url=stack.url(), headers=headers, trust_env=False, timeout=HANG_S)


def told(answer: dict[str, Any]) -> tuple[str, int]:
    """The text of a completion, and how many tokens of its prompt were found in a cache."""
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def complete(stack: Stack, tenant: str, prompt: str, **more: Any) -> tuple[str, int]:
    body = {"model": SERVED, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}
    with client(stack, tenant) as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return told(answer.json())


def batch(stack: Stack, tenant: str, prompt: str) -> tuple[dict[str, Any], tuple[str, int]]:
    """A batch of one completion to its end, and what `told` is of its line."""
    body = {"model": SERVED, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    line = json.dumps({"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body})
    with client(stack, tenant) as http:
        uploaded = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", line.encode())}).json()
        asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        made: dict[str, Any] = http.post("/v1/batches", json=asked).json()
        url = f"/v1/batches/{made['id']}"
        until(lambda: http.get(url).json()["status"] == "completed", lambda: http.get(url).text)
        made = http.get(url).json()
        result = json.loads(http.get(f"/v1/files/{made['output_file_id']}/content").text)
    return made, told(result["response"]["body"])


def test_tenants_find_only_their_own_prefixes(stack: Stack) -> None:
    text, cached = complete(stack, "acme", PROMPT)
    assert cached == 0
    again = complete(stack, "acme", PROMPT)
    assert (again[0], again[1] > 0) == (text, True)
    for tenant in ("big", ""):
        assert complete(stack, tenant, PROMPT) == (text, 0)
        assert complete(stack, tenant, PROMPT) == again
    # A salt is one more wall, inside of a tenant.
    for tenant in ("acme", "big"):
        assert complete(stack, tenant, PROMPT, cache_salt="4:acme:") == (text, 0)
        assert complete(stack, tenant, PROMPT, cache_salt="4:acme:") == again


def test_the_store_knows_whose_blocks_are_and_keeps_to_quotas(stack: Stack) -> None:
    prompt = f"to be stored: {PROMPT}"
    blocks = len(prompt) // 32
    assert blocks > SMALL_BLOCKS
    for tenant in ("acme", "big", "small"):
        complete(stack, tenant, prompt)
    for tenant in ("acme", "big"):
        until(lambda tenant=tenant: len(stack.listed("host", tenant=tenant)) >= blocks, lambda: stack.log("kvstore"))
    assert not stack.listed("host", tenant="acme") & stack.listed("host", tenant="big")
    for n in range(3):
        complete(stack, "small", f"{n}{prompt}")
    stack.settle()
    assert len(stack.listed("host", tenant="small")) == SMALL_BLOCKS
    for tenant in ("acme", "big"):
        assert len(stack.listed("host", tenant=tenant)) >= blocks, "nobody else's went for it"
    stack.clear_workers()
    assert complete(stack, "", prompt)[1] == 0, "nobody else finds what the store has"


def test_what_a_tenant_stores_is_its_own(stack: Stack) -> None:
    """Responses, files and batches; also after a restart, for what outlives it."""
    prompt = f"of a batch: {PROMPT}"
    text, _ = complete(stack, "acme", prompt)
    theirs, (first, cached) = batch(stack, "big", prompt)
    assert (first, cached) == (text, 0), "a line looks where its tenant's requests do"
    ours, (second, cached) = batch(stack, "acme", prompt)
    assert (second, cached > 0) == (text, True)
    with client(stack, "acme") as a, client(stack, "big") as b:
        response = a.post("/v1/responses", json={"model": SERVED, "input": "hi", "max_output_tokens": 4}).json()["id"]
        assert a.get(f"/v1/responses/{response}").status_code == 200
        assert b.get(f"/v1/responses/{response}").status_code == 404
        assert b.delete(f"/v1/responses/{response}").status_code == 404
    stack.restart_in_place("frontend")
    stack.wait_usable()
    paths = [f"/v1/batches/{ours['id']}"]
    paths += [
        f"/v1/files/{ours[name]}{rest}" for name in ("input_file_id", "output_file_id") for rest in ("", "/content")
    ]
    with client(stack, "acme") as a, client(stack, "big") as b, client(stack, "") as plain:
        for path in paths:
            assert [http.get(path).status_code for http in (a, b, plain)] == [200, 404, 404], path
        assert b.delete(f"/v1/files/{ours['input_file_id']}").status_code == 404
        asked = {"input_file_id": ours["input_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert b.post("/v1/batches", json=asked).status_code == 404
        for path, wanted in (("/v1/batches", {"id"}), ("/v1/files", {"input_file_id", "output_file_id"})):
            for http, made in ((a, ours), (b, theirs)):
                assert {one["id"] for one in http.get(path).json()["data"]} == {made[name] for name in wanted}
            assert plain.get(path).json()["data"] == []


def test_who_would_come_too_late_is_told_to_come_again(stack: Stack) -> None:
    stack.kill("frontend")
    stack.launch("frontend", ttft_slo_s=1e-9).wait_ready()
    stack.wait_usable()
    body = {"model": SERVED, "prompt": PROMPT, "max_tokens": 1}
    with client(stack, "acme") as http:
        answer = http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "no_capacity")
        assert int(answer.headers["retry-after"]) >= 1
        assert "first token in" in answer.json()["error"]["message"]
    stack.restart_in_place("frontend")
    stack.wait_usable()
    assert complete(stack, "acme", PROMPT)
