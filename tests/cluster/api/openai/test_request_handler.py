"""Checks of requests before they run, and the format of errors."""

import asyncio
import json
import logging
from contextvars import ContextVar
from functools import cache
from types import SimpleNamespace

import httpx
import openai
import pytest
from fastapi import FastAPI

from cluster.api.base.authentication import ApiKey, ApiKeys
from cluster.api.base.errors import INTERNAL_MESSAGE
from cluster.api.http import forwarding
from cluster.api.http.bodies import MAX_JSON_DEPTH
from cluster.api.http.limits import HttpLimits
from cluster.api.http_app import make_app
from specdec.types.errors import (
    CrashingRequestError,
    InvalidValueError,
    NotReadyError,
    OverloadedError,
    TargetFailedError,
    UnknownModelError,
)

ALONE = SimpleNamespace(applications=None)
"""Stands for an OperatorService without other applications."""

KEY = "sk-correct-horse"
URL = "/detokenize"
BODY = {"tokens": [1]}
BEARER = {"authorization": f"Bearer {KEY}"}


class Failing:
    """A router whose calls raise an error, if one is given."""

    failure = None
    config = SimpleNamespace(request_timeout_s=5, served_model_name="tiny", ingress="embedded")

    def __init__(self, error=None):
        self.error = error
        self.codes = []
        self.metrics = SimpleNamespace(count_failure=self.codes.append)

    def check_admission(self, model, num_choices):
        pass

    async def detokenize(self, call):
        if self.error is not None:
            raise self.error
        return "decoded"


SERVED = ContextVar("the router, OperatorService and keys of the request that is served")
LIMITS = HttpLimits(max_body_bytes=2**20)


@cache
def routes():
    """Make the application of all tests, which takes 40 ms, and as long for its first request."""
    parts = [lambda index=index: SERVED.get()[index] for index in range(3)]
    return make_app(*parts, lambda: LIMITS)


def application(router, keys, admin=ALONE):
    """Make an application that keeps its keys, and their limits, between requests."""
    served = router or Failing(), admin, ApiKeys(keys)

    async def serve(scope, receive, send):
        token = SERVED.set(served)
        try:
            await routes()(scope, receive, send)
        finally:
            SERVED.reset(token)

    return serve


def client(router=None, keys=(), admin=ALONE):
    """Make a client of such an application."""
    transport = httpx.ASGITransport(application(router, keys, admin))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def beside(other):
    """Stand for an OperatorService with another application, which serves the model `b`."""

    async def find(model):
        return SimpleNamespace(stream=stream)

    def stream(method, request, session_id):
        assert method == "answer_request"
        return forwarding.answer(other, request)

    return SimpleNamespace(applications=SimpleNamespace(find=find))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (rb'{"model": "\ud83d", "tokens": [1]}', "JSON without lone surrogates"),
        (b'{"model": "\xed\xa0\xbd", "tokens": [1]}', "JSON in UTF-8"),
    ],
)
async def test_a_body_is_text_that_can_be_sent_back(body, message):
    """Such a text ended in an internal error where it was hashed, returned or quoted."""
    async with client() as http:
        refused = await http.post(URL, content=body, headers={"content-type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "body")
    assert message in refused.json()["error"]["message"]


async def test_an_error_that_cannot_be_encoded_occupies_no_slot(caplog):
    caplog.set_level(logging.CRITICAL)  # its text cannot be encoded in a test report either
    router = Failing(InvalidValueError("tokens", 1, "what has no lone \ud83d"))
    keys = [ApiKey("ann", KEY, max_concurrent_requests=1)]
    app = application(router, keys)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for status in (500, 200):
            assert (await http.post(URL, json=BODY, headers=BEARER)).status_code == status
            router.error = None


async def status_after(router, **first):
    """Return the status for a client that sends a message and disconnects."""
    messages, statuses = [{"type": "http.request", **first}, {"type": "http.disconnect"}], []

    async def receive():
        return messages.pop(0)

    async def send(message):
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": URL, "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    await application(router, ())(scope, receive, send)
    return statuses[0]


async def test_a_client_that_leaves_while_it_sends_is_no_invalid_request():
    router = Failing()
    assert await status_after(router, body=b'{"tok', more_body=True) == 499
    assert router.codes == []


async def test_a_client_that_leaves_waits_for_no_tokenizer():
    """It would keep its place among the prompts that wait."""
    router, cancelled = Failing(), []

    async def stalled(call):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(call)
            raise

    router.detokenize = stalled
    async with asyncio.timeout(30):
        assert await status_after(router, body=json.dumps(BODY).encode()) == 499
    assert len(cancelled) == 1


async def test_the_request_id_is_returned_or_generated():
    async with client() as http:
        named = await http.post(URL, json=BODY, headers={"x-request-id": "my-id"})
        made = [(await http.post(URL, json=BODY)).headers["x-request-id"] for _ in range(2)]
        wrong = await http.post(URL, json=BODY, headers={"x-request-id": "x" * 129})
        failed = await http.post(URL, json={}, headers={"x-request-id": "my-id"})
    assert (named.headers["x-request-id"], named.json()) == ("my-id", {"prompt": "decoded"})
    assert made[0] != made[1]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "request_id")
    assert (failed.status_code, failed.headers["x-request-id"]) == (400, "my-id")


async def test_openais_client_does_not_repeat_a_request_that_ends_the_model():
    router = Failing(CrashingRequestError(num_output_tokens=7))
    async with client(router) as http:
        ours = openai.AsyncOpenAI(
            base_url="http://test", api_key="unused", max_retries=3, http_client=http
        )
        with pytest.raises(openai.InternalServerError, match="the model process was lost"):
            await ours.post(URL, cast_to=object, body=BODY)
    assert len(router.codes) == 1


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (OverloadedError("queue full"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (NotReadyError("it drains"), 503, "service_unavailable_error", "service_unavailable"),
        (TargetFailedError("secret"), 503, "service_unavailable_error", "service_unavailable"),
        (UnknownModelError("a", "b"), 404, "invalid_request_error", "model_not_found"),
        (RuntimeError("secret"), 500, "server_error", None),
    ],
)
async def test_errors_have_openais_format(error, status, kind, code):
    router = Failing(error)
    async with client(router) as http:
        response = await http.post(URL, json=BODY)
    details = response.json()["error"]
    assert response.status_code == status
    assert set(details) == {"message", "type", "param", "code"}
    assert (details["type"], details["param"], details["code"]) == (kind, None, code)
    assert "secret" not in details["message"]
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert len(router.codes) == 1
    if status == 500:
        assert details["message"] == INTERNAL_MESSAGE


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"\xff", "body"),
        (b"[]", "body"),
        (b'{"tokens": [' + b"1" * 5000 + b"]}", "body"),
        (b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1), "body"),
        (b"[" * 100_000, "body"),
        (b'{"tokens": [1], "tokenz": [2]}', "tokenz"),
        (b'{"tokens": "\\ud83d"}', "body"),
        (b'{"\\uDE00": 1}', "body"),
        (b'{"tokens": "\\ud83d\\ude00"}', "tokens"),
        (b'{"tokens": [1.5]}', "tokens[0]"),
        (b'{"tokens": ["1"]}', "tokens[0]"),
        (b"{}", "tokens"),
    ],
)
async def test_the_error_of_an_invalid_body_names_the_field(content, param):
    async with client() as http:
        headers = {"content-type": "application/json"}
        response = await http.post(URL, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_too_large_body_is_rejected_before_it_is_read(is_declared):
    async def parts():
        for _ in range(40):
            yield b" " * 2**15

    headers = {"content-type": "application/json"}
    content = b" " * (2**20 + 1) if is_declared else parts()
    async with client() as http:
        response = await http.post(URL, content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 400),
        ({}, 400),
        ({"content-type": "application/json", "sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "application/json", "origin": "http://elsewhere"}, 403),
    ],
)
async def test_cross_site_requests_are_rejected(headers, status):
    async with client() as http:
        response = await http.post(URL, content=b'{"tokens": [1]}', headers=headers)
    assert response.status_code == status


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny"])
async def test_every_path_needs_a_key_if_keys_are_configured(path):
    async with client(keys=[ApiKey("ann", KEY)]) as http:
        assert (await http.get(path)).status_code == 401
        refused = await http.post(URL, json=BODY, headers={"authorization": "Bearer sk-wrong-key"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await http.post(URL, json=BODY, headers=BEARER)).status_code == 200
        assert (await http.get("/health")).status_code != 401


async def test_the_key_is_checked_before_the_body_is_read():
    async with client(keys=[ApiKey("ann", KEY)]) as http:
        assert (await http.post(URL, content=b"{")).status_code == 401


async def test_slots_of_a_key_are_released_after_answers_and_errors():
    keys = [ApiKey("ann", KEY, max_concurrent_requests=1)]
    async with client(keys=keys) as http:
        for body, status in [(BODY, 200), ({}, 400)] * 2:
            assert (await http.post(URL, json=body, headers=BEARER)).status_code == status


async def test_a_key_over_its_rate_limit_gets_a_retry_hint():
    keys = [ApiKey("ann", KEY, requests_per_s=0.1)]
    async with client(keys=keys) as http:
        assert (await http.post(URL, json=BODY, headers=BEARER)).status_code == 200
        response = await http.post(URL, json=BODY, headers=BEARER)
    assert (response.status_code, response.headers["retry-after"]) == (429, "10")


LIMITED = [ApiKey("ann", KEY, requests_per_s=0.1, max_concurrent_requests=1)]


async def test_a_forwarded_request_counts_in_the_other_application_only():
    elsewhere = Failing(UnknownModelError("b", "tiny"))
    other = application(None, [ApiKey("ann", KEY)])
    async with client(elsewhere, LIMITED, beside(other)) as http:
        for _ in range(3):
            assert (await http.post(URL, json=BODY, headers=BEARER)).json() == {"prompt": "decoded"}
        elsewhere.error = None
        assert (await http.post(URL, json=BODY, headers=BEARER)).status_code == 200
        assert (await http.post(URL, json=BODY, headers=BEARER)).status_code == 429
    async with client(Failing(UnknownModelError("b", "tiny")), [], beside(other)) as http:
        refused = await http.post(URL, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    limited = application(None, LIMITED)
    async with client(Failing(UnknownModelError("b", "tiny")), [], beside(limited)) as http:
        answers = [await http.post(URL, json=BODY, headers=BEARER) for _ in range(2)]
        assert [each.status_code for each in answers] == [200, 429]


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "soon"])
async def test_an_invalid_timeout(timeout):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with client() as http:
        headers = {"x-request-timeout-s": timeout}
        response = await http.post("/v1/chat/completions", json=chat, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout-s")


async def test_the_openapi_document_describes_every_route_and_is_public():
    async with client(keys=[ApiKey("ann", KEY)]) as http:
        document = (await http.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
    }
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert schemas["ChatRequest"]["properties"]["top_p"]["maximum"] == 1


async def test_a_body_is_read_without_fastapi(monkeypatch):
    """Also under the prefix of an application; other methods of the path are FastAPI's."""

    async def answer(self, scope, receive, send):
        raise AssertionError(scope["path"])

    monkeypatch.setattr(FastAPI, "__call__", answer)
    for root, path in (("", URL), ("/b", f"/b{URL}")):
        transport = httpx.ASGITransport(application(None, ()), root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.post(path, json=BODY)).json() == {"prompt": "decoded"}
            with pytest.raises(AssertionError, match=path):
                await http.get(path)


async def test_of_several_keys_the_first_one_counts():
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer sk-wrong-key")]
    async with client(keys=[ApiKey("ann", KEY)]) as http:
        assert (await http.post(URL, json=BODY, headers=headers)).status_code == 200
        assert (await http.post(URL, json=BODY, headers=headers[::-1])).status_code == 401
