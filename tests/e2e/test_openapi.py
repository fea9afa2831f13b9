"""Tests the HTTP API with schemathesis: requests that match its OpenAPI document, or do not.

`make test-openapi`. Whatever is sent, an answer is one that the document knows, and never 500.
"""

from __future__ import annotations

import os

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

pytest.importorskip("schemathesis", reason="needs schemathesis: pip install -e '.[dev]'")

import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_EXAMPLES = int(os.environ.get("SPECDEC_TEST_EXAMPLES", "300"))
"""Number of examples per route, of both valid and invalid requests."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
TIME_IS_UP = 504

POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/detokenize",
)
GETS = ("/v1/models", "/v1/models/{model}")
TRIED = [
    *(("POST", path, mode) for path in POSTS for mode in GenerationMode),
    *(("GET", path, GenerationMode.POSITIVE) for path in GETS),
]


@pytest.fixture(scope="module")
def api(embedded):
    return schemathesis.openapi.from_url(f"{embedded.http_url}/openapi.json")


def test_every_described_operation_is_tested(api):
    assert {*POSTS, *GETS} == set(api)


@pytest.mark.parametrize(("method", "path", "mode"), TRIED)
def test_every_response_matches_the_document(api, embedded, method, path, mode):
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    def ask(case):
        if isinstance(case.body, dict):  # short outputs, since the engine is not tested here
            case.body = {**case.body, **shorter(case)}
        response = case.call(headers={"X-Request-Timeout-S": "20"}, timeout=60)
        checks = [status_code_conformance] if response.status_code == TIME_IS_UP else CHECKS
        case.validate_response(response, checks=checks)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    ask()
    assert httpx.get(f"{embedded.http_url}/ready").status_code == 200


def shorter(case):
    fields = {"/v1/responses": "max_output_tokens", "/v1/completions": "max_tokens"}
    name = fields.get(case.path) or ("max_tokens" if "chat" in case.path else None)
    if name is None or not isinstance(case.body.get(name, 1), int):
        return {}
    return {name: min(case.body.get(name, 4), 4)}
