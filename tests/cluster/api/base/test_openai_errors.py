"""Conversion of errors to OpenAI's format."""

import pytest
from fastapi.exceptions import RequestValidationError
from grpc import StatusCode
from pydantic import ValidationError

from cluster.api.base.authentication import NoApiKeyError
from cluster.api.base.openai_errors import failure_of
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.api.openai.schemas.completion_schema import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cluster.api.openai.schemas.responses_schema import ResponsesRequest
from specdec.types.errors import DeadlineExceededError, InvalidValueError, OverloadedError

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def failure_of_chat(body):
    """Return the failure of an invalid chat."""
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    found = [{**each, "loc": ("body", *each["loc"])} for each in caught.value.errors()]
    return failure_of(RequestValidationError(found, body=body), ChatRequest)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"n": "3"}, "n", "n is '3'; it must be a valid integer"),
        ({"messages": []}, "messages", "it must be a list that has at least 1 item"),
        ({"messages": "x"}, "messages", "it must be a valid list"),
        ({"messages": ["x"]}, "messages[0]", "messages[0] is 'x'; it must be a JSON object"),
        ({"messages": [{}]}, "messages[0].role", "it must be given"),
        ({"metadata": 3}, "metadata", "metadata is 3; it must be a JSON object"),
        ({"stream_options": []}, "stream_options", "it must be a JSON object"),
        ({"stop": ["x"] * 17}, "stop", "it must be a list that has at most 16 items"),
        ({"stop": 3}, "stop", "stop is 3; it must be a valid string or a valid list"),
        (
            {"frequncy_penalty": 1},
            "frequncy_penalty",
            "unknown field 'frequncy_penalty'; did you mean frequency_penalty?",
        ),
        ({"xyz": 1}, "xyz", "unknown field 'xyz'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "returns": {}}}]},
            "tools[0].function.returns",
            "unknown field 'tools[0].function.returns'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]},
            "tools[0].function.parameter",
            "did you mean parameters?",
        ),
        ({"argument": "{}"}, "argument", "unknown field 'argument'"),
        ({"documents": ["x"]}, "documents", "it must be left out: put them into a message"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "it must be given"),
        ({"tool_choice": "some"}, "tool_choice", "'none', 'auto' or 'required'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "it must be a string that matches pattern",
        ),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "JSON is written without whitespace",
        ),
        ({"temperature": float("nan")}, "temperature", "a finite number"),
    ],
)
def test_the_error_names_the_invalid_field_and_its_limit(changes, param, message):
    failure = failure_of_chat({**CHAT, **changes})
    assert (failure.status, failure.grpc_code) == (400, StatusCode.INVALID_ARGUMENT)
    assert failure.details.param == param
    assert message in failure.details.message
    assert failure.details.message.endswith("?") == ("did you mean" in message)
    assert failure.respond().body


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [0.5] + [{}] * 500}),
        (CompletionRequest, {"prompt": [[0.5] * 500] * 100}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 500}),
        (
            CompletionRequest,
            {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(2000)), "")},
        ),
        (CompletionRequest, {"prompt": "x", **{f"x{each}": 1 for each in range(500)}}),
        (ChatRequest, {"messages": [{}] * 500}),
        (ChatRequest, {**CHAT, "metadata": dict.fromkeys(map(str, range(500)), 1)}),
        (TokenizeRequest, {"messages": [{"role": "user", "content": [{}] * 500}]}),
        (DetokenizeRequest, {"tokens": ["x"] * 500}),
        (ResponsesRequest, {"input": [{}] * 500}),
    ],
)
def test_validation_of_a_long_body_stops_early(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 4


@pytest.mark.parametrize(
    ("name", "parent"),
    [
        ("num_speculative_tokens", "speculation"),
        ("verifier", "speculation"),
        ("include_usage", "stream_options"),
        ("enable_thinking", "chat_template_kwargs"),  # Alibaba's place of it
        ("thinking", "chat_template_kwargs"),  # DeepSeek's and Z.ai's
    ],
)
def test_the_error_of_a_field_at_the_wrong_level_names_the_right_one(name, parent):
    details = failure_of_chat({**CHAT, name: 3}).details
    assert details.param == name
    assert f'it must be a field of {parent}, as in "{parent}": {{"{name}": ...}}' in details.message


def test_the_error_of_a_field_names_no_list_of_objects():
    message = failure_of_chat({**CHAT, "reasoning": {"effort": "low"}}).details.message
    assert message == "unknown field 'reasoning'; did you mean reasoning_effort?"


def test_an_unknown_name_is_truncated():
    failure = failure_of_chat({**CHAT, "x" * 100_000: 1})
    assert len(failure.details.message) < 1000
    assert failure.details.param == "x" * 100


def test_a_null_field_counts_as_left_out():
    nulls = dict.fromkeys(["n", "stop", "tools", "functions", "audio"])
    assert ChatRequest.model_validate({**CHAT, **nulls}).n is None


def test_the_field_of_a_length_is_the_field_itself():
    details = failure_of(InvalidValueError("prompt length", 0, "from 1 to 9")).details
    assert details.param == "prompt"
    assert details.message == "prompt length is 0; it must be from 1 to 9"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("logprobs", "top_logprobs"),
        ("structured_output.json_schema", "response_format.json_schema.schema"),
        ("structured_output", "structured_outputs"),
        ("prompt[3]", "messages[3]"),
        ("temperature", "temperature"),
        ("logprobs_of_something", "logprobs_of_something"),
    ],
)
def test_fields_have_their_names_in_the_api(field, param):
    failure = failure_of(InvalidValueError(field, 1, "2"), names=ChatRequest.api_names)
    assert failure.details.param == param
    assert failure.details.message == f"{param} is 1; it must be 2"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers", "grpc_code"),
    [
        (
            DeadlineExceededError("late"),
            504,
            "timeout_error",
            "deadline_exceeded",
            {"x-should-retry": "false"},
            StatusCode.DEADLINE_EXCEEDED,
        ),
        (
            OverloadedError("slowly", retry_after_s=2),
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
            {"Retry-After": "2"},
            StatusCode.RESOURCE_EXHAUSTED,
        ),
        (
            NoApiKeyError(),
            401,
            "authentication_error",
            "invalid_api_key",
            {"WWW-Authenticate": "Bearer"},
            StatusCode.UNAUTHENTICATED,
        ),
    ],
)
def test_a_failure_has_status_code_and_headers(error, status, kind, code, headers, grpc_code):
    failure = failure_of(error)
    assert (failure.status, failure.headers) == (status, headers)
    assert (failure.details.type, failure.details.code) == (kind, code)
    assert failure.grpc_code is grpc_code
