"""Bodies drawn from our OpenAPI description, right and wrong ones, against a running frontend: no 5xx, no hang, and
nothing that the description does not say.

`make test` draws some dozens for each operation; `make api-cases` 5,000 in all (`BATON_API_CASES`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.stack import Stack
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CASES = int(os.environ.get("BATON_API_CASES", "240"))
"""In all: half of them right, half wrong, POSTs ten times as many as GETs."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
HANG_S = 60.0
FEW_TOKENS, FEW_OUTPUTS = 4, 3
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{id}"),
    ("DELETE", "/v1/responses/{id}"),
    ("POST", "/v1/responses/{id}/cancel"),
    ("GET", "/v1/responses/{id}/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/baton/explain"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{id}"),
    ("DELETE", "/v1/files/{id}"),
    ("GET", "/v1/files/{id}/content"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{id}"),
    ("POST", "/v1/batches/{id}/cancel"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/generate"),
    ("PUT", "/generate"),
    ("GET", "/get_model_info"),
    ("GET", "/model_info"),
    ("GET", "/get_server_info"),
    ("GET", "/server_info"),
    ("GET", "/health_generate"),
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]
EACH = CASES // (2 * sum(method == "POST" and "{" not in path for method, path in OPERATIONS) + 1)
"""Of an operation's right or wrong bodies: however many operations there are, CASES is what is drawn."""

EITHER = ("/tokenize", "/generate")
"""Bodies of these have one of two fields: few that are drawn are right, of MANY some."""
MANY = 100


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A merged worker of a tiny model, and a frontend."""
    directory = tmp_path_factory.mktemp("openapi")
    model = make_tiny_model(directory / "tiny", layers=1, hidden=32, context=512)
    run = Stack(directory, model, prefill=0, decode=0, kvstore=False, http={"batch_dir": directory / "kept"})
    run.start()
    yield run
    run.teardown()


@pytest.fixture(scope="module")
def api(stack: Stack) -> Any:
    """The description that the frontend serves."""
    description = httpx.get(f"{stack.url()}/openapi.json", trust_env=False).json()
    assert {(m.upper(), p) for p, methods in description["paths"].items() for m in methods} == set(OPERATIONS)
    return schemathesis.openapi.from_dict(description)


def _cheap(body: Any) -> None:
    """Ask for few tokens where many would be right: what is drawn is how requests look, not how long answers are."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            wanted = body.get(name)
            if name != "max_completion_tokens" or name in body:
                bounded = isinstance(wanted, int) and not isinstance(wanted, bool) and FEW_TOKENS < wanted < 500
                body[name] = FEW_TOKENS if wanted is None or bounded else wanted
        for name in ("n", "best_of"):
            wanted = body.get(name)
            if isinstance(wanted, int) and not isinstance(wanted, bool) and FEW_OUTPUTS < wanted <= 128:
                body[name] = FEW_OUTPUTS
        if isinstance(params := body.get("sampling_params", {}), dict):
            wanted = params.get("max_new_tokens")
            bounded = isinstance(wanted, int) and not isinstance(wanted, bool) and FEW_TOKENS < wanted < 500
            if wanted is None or bounded:
                body["sampling_params"] = params | {"max_new_tokens": FEW_TOKENS}
            _cheap_outputs(body.get("sampling_params"))


def _cheap_outputs(body: Any) -> None:
    if isinstance(body, dict):
        wanted = body.get("n")
        if isinstance(wanted, int) and not isinstance(wanted, bool) and FEW_OUTPUTS < wanted <= 128:
            body["n"] = FEW_OUTPUTS


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_what_is_drawn_is_answered_as_described(
    stack: Stack, api: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = api[path][method]
    wrong = mode is GenerationMode.NEGATIVE
    if wrong and (method == "GET" or path == "/flush_cache") and "{" not in path:
        pytest.skip("there is nothing to get wrong")
    statuses: dict[int, int] = {}

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=max(1, EACH if method == "POST" and "{" not in path else EACH // 10),
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize="BATON_API_CASES" not in os.environ,
        database=None,
    )
    def draw(case: Any) -> None:
        _cheap(case.body)
        answer = case.call(base_url=stack.url(), timeout=HANG_S)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        case.validate_response(answer, checks=CHECKS)

    draw()
    print(f"{method} {path} {mode.value}: {statuses}")
    known = "{id}" not in path and path != "/v1/batches"  # nobody has what the others name
    if not wrong and known and (EACH >= MANY or path not in EITHER):
        assert statuses.get(200), "nothing that was drawn is right"
    stack.settle()
