# Modules: cluster.api.base.anthropic_errors, cluster.api.anthropic.schema
"""Anthropic's Messages API: requests and responses in the format of its client."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fastapi import Request

from cluster.api.anthropic.messages import MessageBody, MessagesBuilder, _complete
from cluster.api.base.anthropic_errors import error_body
from cluster.api.base.openai_errors import failure_of
from cluster.api.openai.parsers.pieces import CallArguments, CallStart, Content, Reasoning
from cluster.api.openai.request_handler import authorization_of
from specdec.types.errors import AbortedError, SlowBodyError
from specdec.types.responses import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/messages"
JSON = {"content-type": "application/json"}
BODY = {
    "model": "tiny",
    "max_tokens": 12,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Ask the baker"}],
}
TOOL = {
    "name": "ask",
    "input_schema": {
        "type": "object",
        "properties": {"who": {"enum": ["baker", "river"]}},
        "required": ["who"],
        "additionalProperties": False,
    },
}


async def ask(http, **changes):
    response = await http.post(URL, json={**BODY, **changes})
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(http, **changes):
    response = await http.post(URL, json={**BODY, **changes, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_message_has_the_text_of_a_chat(http):
    message = await ask(http)
    chat = {"messages": BODY["messages"], "max_tokens": 12, "temperature": 0}
    plain = (await http.post("/v1/chat/completions", json=chat)).json()
    assert message["content"] == [
        {"type": "text", "text": plain["choices"][0]["message"]["content"]}
    ]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (total, usage["output_tokens"]) == (plain["usage"]["prompt_tokens"], 12)
    assert usage["speculation"]["is_lossless"]


async def test_a_last_message_of_the_assistant_is_continued(http):
    """The API's way to give the beginning of an answer; the response has what follows it."""
    messages = [*BODY["messages"], {"role": "assistant", "content": "The baker"}]
    message = await ask(http, messages=messages)
    chat = {"messages": messages, "max_tokens": 12, "temperature": 0}
    options = {"continue_final_message": True, "add_generation_prompt": False}
    plain = (await http.post("/v1/chat/completions", json={**chat, **options})).json()
    assert message["content"][0]["text"] == plain["choices"][0]["message"]["content"]
    counted = await http.post(f"{URL}/count_tokens", json={"messages": messages})
    assert counted.json() == {"input_tokens": plain["usage"]["prompt_tokens"]}


async def test_a_stream_has_the_events_of_the_client(http):
    whole, events = await ask(http), await streamed(http)
    kinds = [each["type"] for each in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] > 0
    text = "".join(each["delta"]["text"] for each in events[2:-3])
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 12


async def test_a_stop_sequence_is_reported(http):
    text = (await ask(http))["content"][0]["text"]
    stop = text[3:5]
    message = await ask(http, stop_sequences=[stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert stop not in message["content"][0]["text"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "ask"}])
async def test_a_required_call_is_a_block(http, choice):
    changes = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 150}
    message = await ask(http, **changes)
    [block, *_] = message["content"]
    assert (block["type"], block["name"]) == ("tool_use", "ask")
    assert block["input"]["who"] in ("baker", "river")
    events = await streamed(http, **changes)
    deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    first = next(each for each in events if each["type"] == "content_block_start")
    assert first["content_block"]["input"] == {}
    assert {each["type"] for each in deltas} == {"input_json_delta"}
    if choice["type"] == "tool":
        assert message["stop_reason"] == "tool_use"
        assert json.loads("".join(each["partial_json"] for each in deltas)) == block["input"]


async def test_tokens_are_counted_as_for_a_message(http):
    body = {"messages": BODY["messages"], "system": "Be brief.", "tools": [TOOL]}
    response = await http.post(f"{URL}/count_tokens", json={**body, "model": "tiny"})
    usage = (await ask(http, system="Be brief.", tools=[TOOL]))["usage"]
    counted = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert response.json() == {"input_tokens": counted}


@pytest.mark.parametrize(
    ("headers", "authorization"),
    [
        ([(b"x-api-key", b"sk-1")], "Bearer sk-1"),
        ([(b"authorization", b"Bearer sk-2"), (b"x-api-key", b"sk-1")], "Bearer sk-2"),
        ([], None),
    ],
)
async def test_a_key_may_be_in_the_header_of_the_client(headers, authorization):
    assert authorization_of(Request({"type": "http", "headers": headers})) == authorization


@pytest.mark.parametrize(
    ("changes", "status", "kind", "message"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens is 0; it must be at least 1"),
        (
            {"messages": [{"role": "user", "content": "x" * 600}]},
            400,
            "invalid_request_error",
            "prompt is too long: 615 tokens > 511 maximum",
        ),
        ({"model": "other"}, 404, "not_found_error", "is not served"),
        ({"stop_sequence": ["a"]}, 400, "invalid_request_error", "did you mean stop_sequences"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "calls no other services"),
        (
            {"tool_choice": {"type": "tool"}, "tools": [TOOL]},
            400,
            "invalid_request_error",
            "tool_choice.name is None; it must be given with type tool",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0] is {'type': 'image', 'source': {}}; it must be a block of type "
            "text, tool_use, tool_result, thinking, redacted_thinking: the served model reads text "
            "only",
        ),
        (
            {
                "tools": [{"name": "f", "input_schema": {"properties": {"a": {"$ref": "#/b"}}}}],
                "tool_choice": {"type": "any"},
            },
            400,
            "invalid_request_error",
            "tools is 'start: call",
        ),
    ],
)
async def test_errors_have_anthropics_format(http, changes, status, kind, message):
    response = await http.post(URL, json={**BODY, **changes})
    assert response.status_code == status, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert message in body["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", URL, 405, "invalid_request_error"),
        ("POST", f"{URL}/batches", 404, "not_found_error"),
    ],
)
async def test_errors_below_the_path_have_anthropics_format(http, method, path, status, kind):
    response = await http.request(method, path)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AbortedError("r"), "invalid_request_error"),
        (SlowBodyError(1), "invalid_request_error"),
        (ValueError("a"), "api_error"),
    ],
)
async def test_an_error_without_a_type_in_the_table_has_that_of_its_class(error, kind):
    assert error_body(failure_of(error))["error"]["type"] == kind


async def test_the_error_of_a_budget_has_its_name(http, router, monkeypatch):
    config = replace(router.config, reasoning_parser="qwen3")
    monkeypatch.setattr(router, "config", config)
    thinking = {"type": "enabled", "budget_tokens": 0}
    response = await http.post(URL, json={**BODY, "thinking": thinking})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("thinking.budget_tokens is 0; it must be")


async def test_blocks_follow_the_pieces_of_an_answer():
    """Thinking, text and calls are blocks with their own starts and ends."""
    builder = MessagesBuilder.__new__(MessagesBuilder)
    builder._blocks = []
    builder._tools = SimpleNamespace(form=None)
    pieces = [
        Reasoning("Whom"),
        Reasoning("?"),
        Content("I ask."),
        CallStart(0, "ask", "id-0"),
        CallArguments(0, '{"who": '),
        CallArguments(0, '"baker"}'),
        CallStart(1, "ask", "id-1"),
        CallArguments(1, "{}"),
    ]
    changes = [change for piece in pieces for change in builder._add(piece)]
    starts = [each for each in changes if each["type"] == "content_block_start"]
    assert [each["content_block"]["type"] for each in starts] == [
        "thinking", "text", "tool_use", "tool_use",
    ]  # fmt: skip
    assert [each["index"] for each in changes if each["type"] == "content_block_stop"] == [0, 1, 2]
    assert [each["id"] for each in builder._blocks[2:]] == ["id-0", "id-1"]


@pytest.mark.parametrize("reason", FinishReason)
async def test_the_input_of_a_call_is_complete_unless_the_answer_is_cut(reason):
    """In the events too; clients parse them at the end of a block."""
    builder, output = MessagesBuilder.__new__(MessagesBuilder), Mock(finish_reason=reason)
    pieces = [CallStart(0, "ask", "id-0"), CallArguments(0, '{"who": "ba')]
    builder._blocks, builder.meter = [], Mock()
    builder._reader = Mock(read=lambda _: [*pieces, *pieces])
    changes = list(builder._changes(SimpleNamespace(prompt=0, output=output)))
    sent = ["", ""]
    for each in changes:
        if each["type"] == "content_block_delta":
            sent[each["index"]] += each["delta"]["partial_json"]
    ends = '{"who": "ba', '{"who": "ba"}'
    assert sent == [ends[1], ends[reason is not FinishReason.LENGTH]]


@pytest.mark.parametrize("given", ["", '{"who": "ba'])
async def test_arguments_that_are_cut_are_empty(given):
    assert _complete({"type": "tool_use", "input": given})["input"] == {}


@pytest.mark.parametrize(
    "arguments",
    ['{"who": "a\nb",}', r'{"who": "\ud83d"}', '{"who": NaN}', '{"a": ' * 99 + "1" + "}" * 99],
    ids=["slips", "half a character", "no number", "too deep"],
)
async def test_arguments_with_errors_are_an_object_that_is_accepted_back(http, arguments):
    """In a stream and whole."""
    builder = MessagesBuilder.__new__(MessagesBuilder)
    builder._blocks = []
    pieces = [CallStart(0, "ask", "id-0"), CallArguments(0, arguments)]
    _, change = [change for piece in pieces for change in builder._add(piece)]
    block = _complete(builder._blocks[0])
    assert json.loads(change["delta"]["partial_json"]) == block["input"] != {}
    result = {"type": "tool_result", "tool_use_id": "id-0", "content": "Bread"}
    turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    content = MessageBody(message={"messages": [*BODY["messages"], *turns]}).to_json()
    response = await http.post(f"{URL}/count_tokens", content=content, headers=JSON)
    assert response.status_code == 200, response.text
