"""Who may ask: keys from a file that may change, and web origins."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import openai
import pytest

from baton.errors import BatonError, Reason
from baton.model.card import Model
from services.frontend import api_keys as module
from services.frontend.api_keys import ApiKeys
from services.frontend.settings import FrontendSettings
from tests.unit.frontend.peers import HANG_S, ScriptedWorker, Stack, running
from tests.unit.frontend.test_api import HI, TEXT, says

GOOD, OTHER = "sk-first-0123456789", "sk-second-0123456789"
ORIGIN = "https://app.example.org"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "RECHECK_S", 0.0)
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n  {GOOD}  \n{GOOD}\n")
    return path


def http_to(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False)


def allowed(keys: ApiKeys, authorization: str | None) -> bool:
    try:
        keys.check(authorization)
    except BatonError as error:
        assert error.reason is Reason.UNAUTHORIZED  # noqa: PT017
        return False
    return True


@pytest.mark.parametrize("given", [f"Bearer {GOOD}", f"bearer {GOOD}", f"  Bearer   {GOOD}  "])
def test_a_known_key_is_let_in(path: Path, given: str) -> None:
    assert allowed(ApiKeys(path), given)


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", GOOD, f"Basic {GOOD}", f"Bearer {GOOD}x", f"Bearer {GOOD[:-1]}", "Bearer # ours",
     f"Bearer {OTHER}", "Bearer é\udce9".encode("utf-8", "surrogateescape").decode("latin-1"), f"Bearer {GOOD} {GOOD}"],
)  # fmt: skip
def test_any_other_is_not(path: Path, given: str | None) -> None:
    assert not allowed(ApiKeys(path), given)


def test_the_file_is_followed_and_a_slip_changes_nothing(path: Path) -> None:
    keys = ApiKeys(path)
    path.write_text(f"{OTHER}\n")
    assert (allowed(keys, f"Bearer {OTHER}"), allowed(keys, f"Bearer {GOOD}")) == (True, False)
    for slip in (b"", b"# nothing\n", b"\xff\xfe", b"x" * (module.MAX_FILE_BYTES + 1)):
        path.write_bytes(slip)
        assert allowed(keys, f"Bearer {OTHER}"), slip[:10]
    path.unlink()
    assert allowed(keys, f"Bearer {OTHER}")
    replaced = path.with_name("new")
    replaced.write_text(f"{GOOD}\n{OTHER}\n")
    os.replace(replaced, path)
    assert (allowed(keys, f"Bearer {OTHER}"), allowed(keys, f"Bearer {GOOD}")) == (True, True)


def test_what_is_no_file_does_not_hold_anybody_up(path: Path) -> None:
    keys = ApiKeys(path)
    path.unlink()
    os.mkfifo(path)
    assert allowed(keys, f"Bearer {GOOD}")


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_only_a_line_feed_ends_a_line(path: Path, end: str) -> None:
    path.write_text(f"\ufeff{GOOD}\r\n# not{end}sk-commented acme\n", encoding="utf-8")
    keys = ApiKeys(path)
    assert allowed(keys, f"Bearer {GOOD}"), "the mark of UTF-8 is no part of a key"
    assert not allowed(keys, "Bearer sk-commented")


@pytest.mark.parametrize("content", [None, b"", b"# none\n", b"\xff"])
def test_without_a_key_in_it_nobody_starts(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BatonError) as caught:
        ApiKeys(path)
    assert "--api-keys-file" in caught.value.message


async def test_requests_need_a_key_and_probes_do_not(model: Model, path: Path) -> None:
    worker = ScriptedWorker("merged-1", says(model))
    async with running(model, worker, api_keys=ApiKeys(path)) as stack:
        official = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=GOOD, max_retries=0, timeout=HANG_S)
        answer = await official.chat.completions.create(model=model.name, messages=HI)
        assert answer.choices[0].message.content == TEXT
        with pytest.raises(openai.AuthenticationError) as caught:
            await official.with_options(api_key="sk-wrong").chat.completions.create(model=model.name, messages=HI)
        assert caught.value.code == "invalid_api_key"
        assert "sk-wrong" not in caught.value.message
        async with http_to(stack) as http:
            # Refused before the body is looked at, whatever it is and whatever is asked for.
            for method, url in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/nothing"),
                                ("GET", "/v1/chat/completions"), ("POST", "/v1/baton/explain")):  # fmt: skip
                refused = await http.request(method, url, headers={"x-request-id": "mine"})
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"].startswith("Bearer")
                assert refused.headers["x-request-id"] == "mine"
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert set(error) == {"message", "type", "param", "code"}
            for url in ("/health", "/ready", "/metrics", "/openapi.json"):
                assert (await http.get(url)).status_code == 200
        assert stack.count("unauthorized") == 6
        assert len(worker.attempts) == 1


async def test_pages_of_known_origins_may_ask(model: Model, path: Path) -> None:
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST",
                 "access-control-request-headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
    worker = ScriptedWorker("merged-1", says(model))
    async with running(model, worker, api_keys=ApiKeys(path), cors_origins=(ORIGIN,)) as stack, http_to(stack) as http:
        chat = "/v1/chat/completions"
        answer = await http.options(chat, headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert (await http.options(chat, headers=preflight | {"origin": "https://evil.example"})).status_code == 400
        body = {"model": model.name, "messages": HI, "stream": True}
        key = {"authorization": f"Bearer {GOOD}", "origin": ORIGIN}
        answer = await http.post(chat, json=body, headers=key)
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        exposed = answer.headers["access-control-expose-headers"]
        assert all(name in exposed for name in ("x-request-id", "x-baton-route", "retry-after"))
        refused = await http.post(chat, json=body, headers={"origin": ORIGIN})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
        stranger = await http.post(chat, json=body, headers=key | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers
    async with running(model, worker, cors_origins=("*",)) as stack, http_to(stack) as http:
        answer = await http.get("/v1/models", headers={"origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"
    async with running(model, worker) as stack, http_to(stack) as http:
        assert (await http.options(chat, headers=preflight)).status_code == 405
        assert "access-control-allow-origin" not in (await http.get("/v1/models", headers=key)).headers


def test_origins_are_a_list() -> None:
    origins = " https://a.example/, http://localhost:3000 ,"
    settings = FrontendSettings.parse(["--model", "m", "--cors-origins", origins])
    assert settings.origins == ("https://a.example", "http://localhost:3000")
    assert FrontendSettings.parse(["--model", "m"]).origins == ()
