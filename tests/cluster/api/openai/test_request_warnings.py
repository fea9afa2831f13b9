"""Variables that the chat template lacks are left out, with a warning in a header."""

import json

import pytest

from cluster.api.openai.request_warnings import WARNINGS_HEADER, RequestWarning, warning_headers
from tests.cluster.api.openai.test_chat import CHAT, MORE, URL

IGNORED = "ignored: the model's chat template has no such variable"
VARIABLES = {"chat_template_kwargs": {"enable_thinking": True, "tone": "\nkind\n"}}
NAMED = [f"chat_template_kwargs.{name}: {IGNORED}" for name in ("enable_thinking", "tone")]


def warnings_of(response):
    assert response.status_code == 200, response.text
    return json.loads(response.headers.get(WARNINGS_HEADER, "[]"))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_warnings_of_its_request(http, stream):
    body = {**CHAT, **MORE, "stream": stream}
    plain = await http.post(URL, json=body)
    assert WARNINGS_HEADER not in plain.headers
    assert warnings_of(await http.post(URL, json={**body, **VARIABLES})) == NAMED


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("url", "fields", "ignored"),
    [
        (URL, {"reasoning_effort": "a", "verbosity": "low"}, ["reasoning_effort", "verbosity"]),
        (
            "/v1/responses",
            {"reasoning": {"effort": "low"}, "text": {"verbosity": "high"}},
            ["reasoning.effort", "text.verbosity"],
        ),
        (
            "/v1/messages",
            {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}},
            ["thinking", "output_config.effort"],
        ),
    ],
)
async def test_effort_that_the_template_lacks_has_a_warning_on_each_api(http, url, fields, ignored):
    messages = {"messages": CHAT["messages"], "max_tokens": 4}
    body = {"input": "a", "max_output_tokens": 4} if url == "/v1/responses" else messages
    response = await http.post(url, json={**body, **fields})
    assert warnings_of(response) == [f"{name}: {IGNORED}" for name in ignored]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_budget_without_a_parser_of_reasoning_has_a_warning(http):
    thinking = {"type": "enabled", "budget_tokens": 5}
    body = {"messages": CHAT["messages"], "max_tokens": 4, "thinking": thinking}
    [budget, _] = warnings_of(await http.post("/v1/messages", json=body))
    assert budget.startswith("thinking.budget_tokens: ignored")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tokenized_chat_has_the_warnings_of_its_request(http):
    body = {"messages": CHAT["messages"]}
    plain = await http.post("/tokenize", json=body)
    response = await http.post("/tokenize", json={**body, **VARIABLES})
    assert warnings_of(response) == NAMED
    assert response.json() == plain.json()


def test_a_header_is_short_and_ascii():
    assert warning_headers([], dict) == {}
    warnings = [RequestWarning("größe\r\nset-cookie: a" * 99, "gone")] * 99
    [(_, value)] = warning_headers(warnings, dict).items()
    assert len(value) < 4096
    assert value.isascii()
    assert value.isprintable()
    assert len(json.loads(value)) == 8
