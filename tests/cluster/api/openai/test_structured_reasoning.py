# Modules: cluster.api.openai.answer_reading, cluster.api.openai.chat
"""Structured output after reasoning, over each of the APIs, whole and streamed."""

import json
import re
from dataclasses import replace

import pytest

from cluster.api.openai.parsers.reasoning import SYNTAXES, ReasoningSyntax
from tests.cluster.api.openai.conftest import events
from tests.cluster.api.openai.test_chat import CHAT, MORE, TOOL, URL, ask
from tests.cluster.api.openai.test_chat_reasoning import message_text, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

REGEX = "(yes|no), [a-c]{1,3}"
SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["baker", "river"]}},
    "required": ["who"],
    "additionalProperties": False,
}
FORMS = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "guided_json": SCHEMA,
    "structured_outputs": {"regex": REGEX},
    "guided_choice": ["yes, a", "no, b"],
    "guided_grammar": 'start: ("yes" | "no") ", " /[a-c]{1,3}/',
}
SAMPLED = {"temperature": 1, "seed": 3, "max_tokens": 130, "ignore_eos": False}


@pytest.fixture
def thinking(router, monkeypatch):
    """Make the texts of the random model begin within reasoning, which an `e` ends."""

    def think(begins_inside=True, closings=("e",)):
        syntax = ReasoningSyntax(("<think>",), closings, begins_inside)
        monkeypatch.setitem(SYNTAXES, "qwen3", syntax)
        monkeypatch.setattr(router, "config", replace(router.config, reasoning_parser="qwen3"))
        monkeypatch.setattr(router, "new_seed", lambda: 3)

    return think


def is_answer(text):
    if text.startswith("{"):
        return json.loads(text)["who"] in ("baker", "river")
    return re.fullmatch(REGEX, text) is not None


@pytest.mark.parametrize("name", FORMS)
async def test_a_format_follows_reasoning(http, thinking, name):
    thinking()
    form = {name: FORMS[name]}
    whole = await ask(http, **SAMPLED, **form, n=2)
    for choice in whole["choices"]:
        message = choice["message"]
        assert is_answer(message["content"])
        assert message["reasoning_content"]
        assert choice["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    body = {**CHAT, **MORE, **SAMPLED, **form, "stream": True}
    deltas = [each["choices"][0]["delta"] for each in events(await http.post(URL, json=body))]
    message = whole["choices"][0]["message"]
    for field in ("content", "reasoning_content"):
        assert text_of(deltas, field) == message[field]


async def test_without_a_parser_the_whole_text_is_constrained(http):
    for name, form in FORMS.items():
        message = (await ask(http, **SAMPLED, **{name: form}))["choices"][0]["message"]
        assert is_answer(message["content"])
        assert "reasoning_content" not in message


async def test_an_answer_may_begin_without_reasoning(http, thinking):
    thinking(begins_inside=False)
    found = [await ask(http, **{**SAMPLED, "seed": seed}, guided_regex=REGEX) for seed in range(8)]
    messages = [each["choices"][0]["message"] for each in found]
    assert all(is_answer(each["content"]) for each in messages)
    assert any("reasoning_content" not in each for each in messages)


CALLS = [
    ("required", True),
    ("required", False),
    ({"type": "function", "function": {"name": "ask"}}, True),
]


@pytest.mark.parametrize(("choice", "is_parallel"), CALLS)
async def test_forced_calls_follow_reasoning(http, thinking, choice, is_parallel):
    thinking()
    forced = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": is_parallel}
    body = {**CHAT, **MORE, **SAMPLED, **forced}
    [whole] = (await http.post(URL, json=body)).json()["choices"]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["reasoning_content"]
    assert whole["message"]["content"] is None
    calls = [each["function"] for each in whole["message"]["tool_calls"]]
    assert all(json.loads(each["arguments"])["who"] in ("baker", "river") for each in calls)
    assert is_parallel or len(calls) == 1
    streamed = events(await http.post(URL, json={**body, "stream": True}))
    deltas = [each["choices"][0]["delta"] for each in streamed]
    assert text_of(deltas, "reasoning_content") == whole["message"]["reasoning_content"]
    parts = [part for each in deltas for part in each.get("tool_calls", ())]
    arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    assert arguments == "".join(each["arguments"] for each in calls)


async def test_calls_or_an_answer_follow_reasoning(http, thinking):
    thinking()
    tool = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    asked = {"tools": [tool], "response_format": FORMS["response_format"]}
    for seed in range(4):
        [choice] = (await ask(http, **{**SAMPLED, "seed": seed}, **asked))["choices"]
        message = choice["message"]
        assert message["reasoning_content"]
        calls = message.get("tool_calls") or [{"function": {"arguments": message["content"]}}]
        assert all(is_answer(each["function"]["arguments"]) for each in calls)


async def test_a_budget_ends_the_reasoning_before_an_answer(http, thinking, tokenizer):
    thinking(closings=("</think>",))
    asked = {**SAMPLED, "guided_regex": REGEX, "thinking_token_budget": 6}
    body = await ask(http, **asked)
    assert is_answer(body["choices"][0]["message"]["content"])
    num_closing = len(tokenizer.encode("\n</think>", add_special_tokens=False))
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == 6 + num_closing
    forced = {**SAMPLED, "tools": [TOOL], "tool_choice": "required", "thinking_token_budget": 6}
    [choice] = (await http.post(URL, json={**CHAT, **forced})).json()["choices"]
    assert choice["message"]["tool_calls"]


async def test_the_end_of_the_prompt_decides(http, thinking):
    closed = {"role": "assistant", "content": "<think>\na</think>\n"}
    opened = {"role": "assistant", "content": "<think>\na"}
    begun = {"role": "assistant", "content": "So "}
    for begins_inside in (True, False):
        thinking(begins_inside, closings=("</think>", "e"))
        for last, has_reasoning in ((closed, False), (opened, True), (begun, False)):
            messages = [*CHAT["messages"], last]
            body = await ask(
                http, **SAMPLED, guided_regex=REGEX, messages=messages, continue_final_message=True
            )
            message = body["choices"][0]["message"]
            assert is_answer(message["content"])
            assert ("reasoning_content" in message) == has_reasoning


async def test_log_probabilities_have_an_entry_for_each_token(http, thinking):
    thinking()
    asked = {**SAMPLED, "guided_regex": REGEX, "logprobs": True, "return_token_ids": True}
    [choice] = (await ask(http, **asked))["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_a_broken_stream_is_resumed_over_the_mark(http, thinking):
    thinking()
    asked = {**CHAT, **MORE, **SAMPLED, "guided_regex": REGEX, "return_token_ids": True}
    [whole] = (await http.post(URL, json=asked)).json()["choices"]
    token_ids = whole["token_ids"]
    for count in range(1, len(token_ids) - 1):
        body = {**asked, "resume_token_ids": token_ids[:count]}
        [rest] = (await http.post(URL, json=body)).json()["choices"]
        assert rest["token_ids"] == token_ids[count:]
        assert whole["message"]["content"].endswith(rest["message"]["content"])


async def test_a_schema_of_a_response_follows_reasoning(http, thinking):
    thinking()
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    body = {"input": "Ask", "temperature": 1, "max_output_tokens": 150, "text": {"format": form}}
    response = (await http.post("/v1/responses", json=body)).json()
    assert [each["type"] for each in response["output"]] == ["reasoning", "message"]
    assert is_answer(message_text(response))
    tool = {"type": "function", **TOOL["function"]}
    body |= {"text": {}, "tools": [tool], "tool_choice": "required"}
    response = (await http.post("/v1/responses", json=body)).json()
    kinds = [each["type"] for each in response["output"]]
    assert kinds[0] == "reasoning"
    assert set(kinds[1:]) == {"function_call"}
    streamed = (await http.post("/v1/responses", json={**body, "stream": True})).text
    names = re.findall("event: (.*)", streamed)
    assert names.index("response.reasoning_text.delta") < names.index(
        "response.function_call_arguments.delta"
    )


async def test_a_message_of_anthropic_has_its_format_after_thinking(http, thinking):
    thinking()
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = {**CHAT, "max_tokens": 150, "temperature": 1, "output_config": form}
    content = (await http.post("/v1/messages", json=body)).json()["content"]
    assert [each["type"] for each in content] == ["thinking", "text"]
    assert is_answer(content[1]["text"])
    tool = {"name": "ask", "input_schema": TOOL["function"]["parameters"]}
    del body["output_config"]
    body |= {"tools": [tool], "tool_choice": {"type": "any"}}
    content = (await http.post("/v1/messages", json=body)).json()["content"]
    assert content[0]["type"] == "thinking"
    assert {each["type"] for each in content[1:]} == {"tool_use"}
    streamed = (await http.post("/v1/messages", json={**body, "stream": True})).text
    assert streamed.index("thinking_delta") < streamed.index("input_json_delta")
