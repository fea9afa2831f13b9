"""Tests with the openai client on the running service, for both ingresses and SmolLM2."""

from __future__ import annotations

import json
import time
from contextlib import closing
from http.client import HTTPConnection

import httpx
import openai
import pytest

pytestmark = pytest.mark.e2e

ASKED = {"temperature": 0.0, "max_tokens": 16, "seed": 1}
USER = [{"role": "user", "content": "Name a colour."}]
ANIMAL = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"enum": [2, 4]}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "feed", "parameters": ANIMAL}}
LONG = {"n": 100, "max_tokens": 480, "extra_body": {"ignore_eos": True}}
"""A request of 48,000 tokens, for which also the tiny model needs much more than a second."""
ON_SMOLLM2 = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(
    scope="package", params=["embedded", "on_serve", pytest.param("smollm2", marks=ON_SMOLLM2)]
)
def service(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def client(service):
    with openai.OpenAI(
        base_url=f"{service.http_url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture
def model(client):
    [card] = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id
    return card.id


def reports(service):
    """Return the report of each replica."""
    status = httpx.get(f"{service.http_url}/v1/admin/status", timeout=30).json()
    return [each["report"] for each in status["replicas"]]


def num_open(service):
    return sum(each["num_running"] + each["num_waiting"] for each in reports(service))


def num_generated(service):
    """Return the tokens up to a report that has no open request.

    It is up to a second old, so tokens of the last short requests may be missing: then a later
    difference is too large by them. None is missing once `is_running` has been true.
    """
    assert becomes_true(lambda: num_open(service) == 0)
    return sum(each["counts"]["num_generated_tokens"] for each in reports(service))


def becomes_true(is_so, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def is_running(service):
    return becomes_true(lambda: num_open(service) > 0)


def is_aborted(service, num_before):
    """Return whether a LONG request stops before all its tokens are generated."""
    return num_generated(service) - num_before < LONG["n"] * LONG["max_tokens"]


def test_a_chat(client, model):
    response = client.chat.completions.create(model=model, messages=USER, **ASKED)
    [choice] = response.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = response.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    speculation = usage.completion_tokens_details.model_extra["speculation"]
    assert speculation["is_lossless"]


def test_a_stream_equals_the_completion(client, model):
    whole = client.chat.completions.create(model=model, messages=USER, **ASKED)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model=model, messages=USER, **ASKED, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_of_the_client(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    asked = {"model": model, "messages": USER, "temperature": 0, "max_tokens": 60}
    with client.chat.completions.stream(**asked, response_format=form) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_completion()
    assert "content.delta" in kinds
    assert json.loads(response.choices[0].message.content)["animal"] in ("cat", "dog")


def test_speculation_does_not_change_the_output(client, model):
    hot = {**ASKED, "temperature": 0.9}
    texts = {
        client.chat.completions.create(
            model=model, messages=USER, **hot, extra_body={"speculation": options}
        )
        .choices[0]
        .message.content
        for options in ({"enabled": False}, {}, {"num_speculative_tokens": 2})
    }
    assert len(texts) == 1


def test_logprobs(client, model):
    response = client.chat.completions.create(
        model=model, messages=USER, logprobs=True, top_logprobs=3, **ASKED
    )
    places = response.choices[0].logprobs.content
    assert len(places) >= response.usage.completion_tokens - 1  # the end-of-turn token has no text
    for place in places:
        assert len(place.top_logprobs) == 3
        assert place.logprob == pytest.approx(place.top_logprobs[0].logprob)  # greedy
        assert bytes(place.bytes).decode(errors="replace") == place.token


def test_structured_output_matches_the_schema(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    response = client.chat.completions.create(
        model=model, messages=USER, response_format=form, temperature=0, max_tokens=60
    )
    answer = json.loads(response.choices[0].message.content)
    assert answer["animal"] in ("cat", "dog")
    assert answer["legs"] in (2, 4)
    free = client.chat.completions.create(
        model=model, messages=USER, response_format={"type": "json_object"}, **ASKED
    )
    assert free.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_required_tool_is_called(client, model, choice):
    named = {"type": "function", "function": {"name": "feed"}}
    response = client.chat.completions.create(
        model=model,
        messages=USER,
        tools=[TOOL],
        tool_choice=choice if choice == "required" else named,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    )
    [call] = response.choices[0].message.tool_calls
    assert response.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "feed"
    assert json.loads(call.function.arguments)["animal"] in ("cat", "dog")


def test_arguments_of_a_tool_are_streamed(client, model):
    chunks = client.chat.completions.create(
        model=model,
        messages=USER,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
        stream=True,
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "feed"
    assert {call.index for call in calls} == {0}
    assert [call.id is not None for call in calls] == [True] + [False] * (len(calls) - 1)
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments)["legs"] in (2, 4)


def test_choices(client, model):
    hot = {**ASKED, "temperature": 1.2}
    three = client.chat.completions.create(model=model, messages=USER, n=3, **hot)
    two = client.chat.completions.create(model=model, messages=USER, n=2, **hot)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert [choice.message.content for choice in two.choices] == texts[:2]


def test_completions_with_an_echo(client, model):
    response = client.completions.create(
        model=model, prompt="The river", echo=True, logprobs=1, max_tokens=4, temperature=0
    )
    assert response.choices[0].text.startswith("The river")
    assert response.choices[0].logprobs.token_logprobs[0] is None
    several = client.completions.create(model=model, prompt=["a", "b"], max_tokens=2)
    assert [choice.index for choice in several.choices] == [0, 1]


def test_responses(client, model):
    asked = {"model": model, "input": "Name a colour.", "temperature": 0, "max_output_tokens": 16}
    response = client.responses.create(**asked)
    assert response.output_text
    with client.responses.stream(**asked) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
    assert text == response.output_text


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        ({"model": "gpt-9"}, openai.NotFoundError, None),
        ({"extra_body": {"use_beam_search": True}}, openai.BadRequestError, "use_beam_search"),
    ],
)
def test_errors_raise_the_exceptions_of_the_client(client, model, changes, error, param):
    asked = {"model": model, "messages": USER, **ASKED, **changes}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.param == param
    assert caught.value.request_id


def test_the_request_id_is_returned(client, model):
    headers = {"X-Request-Id": "from-the-client"}
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=USER, **ASKED, extra_headers=headers
    )
    assert raw.headers.get_list("x-request-id") == ["from-the-client"]
    assert raw.parse().id == "chatcmpl-from-the-client"


def test_a_closed_stream_is_aborted(client, model, service):
    before = num_generated(service)
    stream = client.chat.completions.create(model=model, messages=USER, stream=True, **LONG)
    next(iter(stream))
    assert is_running(service)
    stream.close()
    assert is_aborted(service, before)


def test_a_request_whose_client_disconnects_is_aborted(service, model):
    before = num_generated(service)
    body = {"model": model, "messages": USER, "ignore_eos": True, **LONG}
    del body["extra_body"]
    headers = {"content-type": "application/json"}
    with closing(HTTPConnection(httpx.URL(service.http_url).netloc.decode())) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        assert is_running(service)
    assert is_aborted(service, before)


def test_a_deadline_aborts_a_request(client, model, service):
    before = num_generated(service)
    headers = {"X-Request-Timeout-S": "1"}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=model, messages=USER, **LONG, extra_headers=headers)
    assert caught.value.status_code == 504
    assert is_aborted(service, before)
