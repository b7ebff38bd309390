"""Tenants: whose a key is, whose KV a prompt finds, and whose the things are that stay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from baton.kv.keys import block_keys
from baton.model.card import Model
from baton.v1 import worker_pb2
from services.frontend.api_keys import ApiKeys
from services.frontend.asked import Api, Unread
from services.frontend.owner import Owner
from services.frontend.reader import LARGE_BYTES
from tests.unit.frontend.peers import HANG_S, Attempt, ScriptedWorker, Stack, running, until
from tests.unit.frontend.talks import dies
from tests.unit.frontend.test_api import TEXT, says

A, B, NOBODY = "sk-a-0123456789", "sk-b-0123456789", "sk-nobody-0123456789"
LONG = "all work and no play makes Jack a dull boy " * 20
HI = [{"role": "user", "content": LONG}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": HI, "max_tokens": 64},
    "/generate": {"text": LONG, "sampling_params": {"temperature": 0}},
}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{NOBODY}\n\n{A} acme\n  {B}\t big.co-2 \n{A} acme\n")
    return path


@pytest.fixture
async def stack(model: Model, path: Path) -> AsyncIterator[Stack]:
    async with running(model, ScriptedWorker("merged-1", says(model)), api_keys=ApiKeys(path)) as stack:
        yield stack


async def post(stack: Stack, url: str, key: str, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False) as http:
        body = {"model": stack.model.name, **BODIES.get(url, {}), **more}
        return await http.post(url, json=body, headers={"authorization": f"Bearer {key}"})


async def asked(stack: Stack, url: str, key: str, **more: Any) -> worker_pb2.Attempt:
    """What a worker is given of a request; the router was told the same of it."""
    answer = await post(stack, url, key, **more)
    assert answer.status_code == 200, answer.text
    attempt = stack.workers[0].attempts[-1].message
    route = stack.router.requests[-1]
    assert route.tenant == attempt.tenant
    keys = block_keys(attempt.key_root, attempt.prompt_ids)
    assert keys
    assert route.packed_keys == b"".join(keys)
    return attempt


def client(stack: Stack, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0, timeout=HANG_S)


# ---- keys


def test_a_key_may_have_a_tenant(path: Path) -> None:
    keys = ApiKeys(path)
    assert [keys.check(f"Bearer {key}") for key in (NOBODY, A, B)] == ["", "acme", "big.co-2"]
    assert keys.check(None, A) == "acme"
    for none in (f"{A} acme", "acme", f"{B}\t big.co-2"):
        with pytest.raises(BatonError):
            keys.check(f"Bearer {none}")


@pytest.mark.parametrize(
    "lines", [f"{A} acme corp", f"{A} a/b", f"{A} a=1", f"{A} *", f"{A} é", f"{A} {'x' * 65}", f"{A} acme\n{A}"]
)
def test_what_names_no_tenant_is_refused(path: Path, lines: str) -> None:
    path.write_text(f"{B}\n{lines}\n")
    with pytest.raises(BatonError, match=r"line [23]"):
        ApiKeys(path)


# ---- whose KV


_names = st.text("0:ab", max_size=3)


@given(_names, _names, _names, _names)
def test_no_two_owners_have_one_salt(tenant: str, salt: str, other: str, others: str) -> None:
    assert (Owner(tenant, salt).salt == Owner(other, others).salt) == ((tenant, salt) == (other, others))


@pytest.mark.parametrize("url", BODIES)
async def test_tenants_share_no_key(stack: Stack, model: Model, url: str) -> None:
    nobody, a, b, again = [await asked(stack, url, key) for key in (NOBODY, A, B, A)]
    assert [attempt.tenant for attempt in (nobody, a, b, again)] == ["", "acme", "big.co-2", "acme"]
    assert nobody.key_root == model.key_root(), "without a tenant it is what it always was"
    assert len({nobody.key_root, a.key_root, b.key_root}) == 3
    assert again.key_root == a.key_root
    assert nobody.prompt_ids == a.prompt_ids == b.prompt_ids


@pytest.mark.parametrize("url", BODIES)
async def test_a_salt_parts_the_requests_of_one_tenant(stack: Stack, url: str) -> None:
    owners = [(NOBODY, None), (NOBODY, "x"), (NOBODY, "4:acme:"), (A, None), (A, "x"), (A, "y"), (B, "x")]
    roots = [(await asked(stack, url, key, cache_salt=salt)).key_root for key, salt in owners]
    assert len(set(roots)) == len(owners)
    assert (await asked(stack, url, A, cache_salt="x")).key_root == roots[4]
    for bad in ("", "x" * 513, 5, ["x", "y"], {}):
        answer = await post(stack, url, A, cache_salt=bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt"), bad


async def test_sglangs_name_of_a_salt_is_the_same(stack: Stack, model: Model) -> None:
    (named, salted, plain) = [
        await asked(stack, "/generate", A, **given) for given in ({"extra_key": "x"}, {"cache_salt": "x"}, {})
    ]
    assert named.key_root == salted.key_root == model.key_root(salt=Owner("acme", "x").salt) != plain.key_root
    answer = await post(stack, "/generate", A, text=[LONG, LONG], extra_key=["x", None])
    assert answer.status_code == 200
    roots = {attempt.message.key_root for attempt in stack.workers[0].attempts[-2:]}
    assert roots == {named.key_root, plain.key_root}
    for bad in ({"extra_key": ""}, {"extra_key": ["x", "y"]}, {"extra_key": 5}, {"extra_key": "x", "cache_salt": "x"}):
        answer = await post(stack, "/generate", A, **bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "extra_key"), bad


@pytest.mark.parametrize("url", [url for url in BODIES if url != "/generate"])
async def test_elsewhere_sglangs_name_of_a_salt_is_refused(stack: Stack, url: str) -> None:
    answer = await post(stack, url, A, extra_key="x")
    assert answer.status_code == 400
    assert "'cache_salt'" in answer.json()["error"]["message"]


async def test_workers_are_told_who_shares_no_cache(stack: Stack) -> None:
    owners = [(NOBODY, None), (NOBODY, "x"), (A, None), (A, "x")]
    parted = [(await asked(stack, "/v1/completions", key, cache_salt=salt)).parted for key, salt in owners]
    assert parted == [False, True, True, True]


async def test_a_resume_goes_on_in_the_same_keys(model: Model, path: Path) -> None:
    workers = [ScriptedWorker("a", dies(model)[0]), ScriptedWorker("b", says(model))]
    async with running(model, *workers, api_keys=ApiKeys(path)) as stack:
        answer = await client(stack, A).completions.create(
            model=model.name, prompt=LONG, extra_body={"cache_salt": "mine"}
        )
        assert answer.choices[0].text == TEXT
        first, second = (worker.attempts[0].message for worker in workers)
        assert second.emitted_ids
        assert (second.tenant, second.key_root) == (first.tenant, first.key_root)
        assert second.key_root == model.key_root(salt=Owner("acme", "mine").salt)
        routed = stack.router.requests[-1]
        ids = [*second.prompt_ids, *second.emitted_ids]
        assert (routed.tenant, routed.packed_keys) == ("acme", b"".join(block_keys(second.key_root, ids)))


async def test_a_large_body_is_its_tenants(stack: Stack, model: Model) -> None:
    body = b'{"model":"%s","prompt":"%s","cache_salt":"s"' % (model.name.encode(), LONG.encode())
    reader = stack.bodies
    small = await reader.read(Unread(body + b"}", Api.COMPLETION, 8192, tenant="acme"))
    large = await reader.read(Unread(body + b" " * LARGE_BYTES + b"}", Api.COMPLETION, 8192, tenant="acme"))
    assert large == small
    assert (small.prompts[0].tenant, small.prompts[0].root) == ("acme", model.key_root(salt=Owner("acme", "s").salt))


async def test_an_explanation_looks_where_the_tenant_would(stack: Stack) -> None:
    a = await asked(stack, "/v1/completions", A)
    answer = await post(stack, "/v1/baton/explain", A, prompt=LONG)
    assert answer.status_code == 200
    (explained,) = stack.router.explained
    assert explained.tenant == "acme"
    assert explained.packed_keys == b"".join(block_keys(a.key_root, a.prompt_ids))


async def test_tokens_of_named_tenants_are_counted(stack: Stack, model: Model) -> None:
    for key in (NOBODY, A, A):
        await post(stack, "/v1/completions", key)
    tokens = len(model.tokenizer.encode(TEXT, add_special=False)) + 1
    assert stack.count("tenant_tokens", tenant="acme", kind="output") == 2 * tokens
    samples = [s for family in stack.metrics.tenant_tokens.collect() for s in family.samples]
    assert {s.labels["tenant"] for s in samples} == {"acme"}


async def test_tokens_of_what_was_refused_are_not_counted(stack: Stack) -> None:
    stack.router.refusal = BatonError(Reason.NO_CAPACITY, "full")
    assert (await post(stack, "/v1/completions", A)).status_code == 429
    assert stack.count("tenant_tokens", tenant="acme", kind="prompt") == 0
    stack.router.refusal = None
    ids = (await asked(stack, "/v1/completions", A)).prompt_ids
    assert stack.count("tenant_tokens", tenant="acme", kind="prompt") == len(ids)


# ---- what stays


async def test_a_kept_response_is_its_tenants(stack: Stack, model: Model) -> None:
    a, b, nobody = (client(stack, key) for key in (A, B, NOBODY))
    made = await a.responses.create(model=model.name, input="hi")
    item = made.output[0].id
    assert item is not None
    for other in (b, nobody):
        for call in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.input_items.list(made.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model=model.name, input=[{"type": "item_reference", "id": item}])
        with pytest.raises(openai.BadRequestError) as caught:
            await other.responses.create(model=model.name, input="on", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"
    assert (await a.responses.retrieve(made.id)).output_text == TEXT
    assert (await a.responses.create(model=model.name, input="on", previous_response_id=made.id)).output_text == TEXT
    referred: Any = [{"type": "item_reference", "id": item}, {"role": "user", "content": "on"}]
    assert (await a.responses.create(model=model.name, input=referred)).output_text == TEXT
    await a.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await a.responses.retrieve(made.id)


async def test_a_response_in_the_background_is_its_tenants(stack: Stack, model: Model) -> None:
    a, b = client(stack, A), client(stack, B)
    made = await a.responses.create(model=model.name, input="hi", background=True)
    await until(lambda: stack.frontend.responses.get(made.id, "acme").status == "completed")
    with pytest.raises(openai.NotFoundError):
        await b.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await b.responses.cancel(made.id)


async def test_a_script_sees_no_tenant_without_keys(model: Model) -> None:
    seen: list[Attempt] = []

    async def script(attempt: Attempt) -> None:
        seen.append(attempt)
        await says(model)(attempt)

    async with running(model, ScriptedWorker("merged-1", script)) as stack:
        await post(stack, "/v1/completions", A)
        assert [(one.message.tenant, one.message.key_root) for one in seen] == [("", model.key_root())]
