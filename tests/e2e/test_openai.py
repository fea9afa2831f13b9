"""The openai client against the running service, on both ingresses and with SmolLM2."""

from __future__ import annotations

import json
import time

import httpx
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ASKED = {"temperature": 0.0, "max_tokens": 16, "seed": 1}
USER = [{"role": "user", "content": "Name a colour."}]
ANIMAL = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"enum": [2, 4]}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "feed", "parameters": ANIMAL}}
ON_SMOLLM2 = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(
    scope="session", params=["embedded", "on_serve", pytest.param("smollm2", marks=ON_SMOLLM2)]
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


def num_running(service):
    status = httpx.get(f"{service.http_url}/v1/admin/status").json()
    return sum(
        each["report"]["num_running"] + each["report"]["num_waiting"] for each in status["replicas"]
    )


def comes_to_rest(service, within_s=10.0):
    """Whether nothing is left to do; replicas report once a second."""
    deadline = time.monotonic() + within_s
    while num_running(service):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def test_a_chat(client, model):
    said = client.chat.completions.create(model=model, messages=USER, **ASKED)
    [choice] = said.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = said.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    speculation = usage.completion_tokens_details.model_extra["speculation"]
    assert speculation["is_lossless"]


def test_a_stream_is_the_chat_in_pieces(client, model):
    whole = client.chat.completions.create(model=model, messages=USER, **ASKED)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model=model, messages=USER, **ASKED, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_clients_own_helper_reads_a_stream(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    asked = {"model": model, "messages": USER, "temperature": 0, "max_tokens": 60}
    with client.chat.completions.stream(**asked, response_format=form) as stream:
        kinds = [event.type for event in stream]
        said = stream.get_final_completion()
    assert "content.delta" in kinds
    assert json.loads(said.choices[0].message.content)["animal"] in ("cat", "dog")


def test_speculation_does_not_change_the_answer(client, model):
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
    said = client.chat.completions.create(
        model=model, messages=USER, logprobs=True, top_logprobs=3, **ASKED
    )
    places = said.choices[0].logprobs.content
    assert len(places) >= said.usage.completion_tokens - 1  # the end of the turn is no text
    for place in places:
        assert len(place.top_logprobs) == 3
        assert place.logprob == pytest.approx(place.top_logprobs[0].logprob)  # greedy
        assert bytes(place.bytes).decode(errors="replace") == place.token


def test_an_answer_by_a_schema(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    said = client.chat.completions.create(
        model=model, messages=USER, response_format=form, temperature=0, max_tokens=60
    )
    answer = json.loads(said.choices[0].message.content)
    assert answer["animal"] in ("cat", "dog")
    assert answer["legs"] in (2, 4)
    free = client.chat.completions.create(
        model=model, messages=USER, response_format={"type": "json_object"}, **ASKED
    )
    assert free.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_tool_that_has_to_be_called(client, model, choice):
    named = {"type": "function", "function": {"name": "feed"}}
    said = client.chat.completions.create(
        model=model,
        messages=USER,
        tools=[TOOL],
        tool_choice=choice if choice == "required" else named,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    )
    [call] = said.choices[0].message.tool_calls
    assert said.choices[0].finish_reason == "tool_calls"
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
    said = client.completions.create(
        model=model, prompt="The river", echo=True, logprobs=1, max_tokens=4, temperature=0
    )
    assert said.choices[0].text.startswith("The river")
    assert said.choices[0].logprobs.token_logprobs[0] is None
    several = client.completions.create(model=model, prompt=["a", "b"], max_tokens=2)
    assert [choice.index for choice in several.choices] == [0, 1]


def test_responses(client, model):
    asked = {"model": model, "input": "Name a colour.", "temperature": 0, "max_output_tokens": 16}
    said = client.responses.create(**asked)
    assert said.output_text
    with client.responses.stream(**asked) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
    assert text == said.output_text


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_completion_tokens"),
        ({"model": "gpt-9"}, openai.NotFoundError, None),
        ({"extra_body": {"use_beam_search": True}}, openai.BadRequestError, "use_beam_search"),
    ],
)
def test_errors_are_the_clients_own(client, model, changes, error, param):
    asked = {"model": model, "messages": USER, **ASKED, **changes}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.param == param
    assert caught.value.request_id


def test_the_id_of_a_request_goes_there_and_back(client, model):
    headers = {"X-Request-Id": "from-the-client"}
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=USER, **ASKED, extra_headers=headers
    )
    assert raw.headers.get_list("x-request-id") == ["from-the-client"]
    assert raw.parse().id == "chatcmpl-from-the-client"


def test_a_stream_that_is_left_is_aborted(client, model, service):
    long = {"max_tokens": 200, "extra_body": {"ignore_eos": True}, "n": 8}
    stream = client.chat.completions.create(model=model, messages=USER, stream=True, **long)
    next(iter(stream))
    stream.close()
    assert comes_to_rest(service)


def test_an_answer_that_nobody_waits_for_is_aborted(service, model):
    long = {"model": model, "messages": USER, "max_tokens": 200, "ignore_eos": True, "n": 8}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.http_url}/v1/chat/completions", json=long, timeout=0.05)
    assert comes_to_rest(service)


def test_a_deadline_ends_an_answer(client, model, service):
    long = {"max_tokens": 200, "extra_body": {"ignore_eos": True}, "n": 8}
    headers = {"X-Request-Timeout-S": "0.05"}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=model, messages=USER, **long, extra_headers=headers)
    assert caught.value.status_code == 504
    assert comes_to_rest(service)
