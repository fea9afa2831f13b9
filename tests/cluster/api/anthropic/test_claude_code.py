# Modules: cluster.api.anthropic.conversion, cluster.api.anthropic.schema
"""Requests that Claude Code sends, as recorded from it; prose and most tools are left out."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.api.anthropic.conversion import to_chat
from cluster.api.anthropic.schema import MessagesRequest
from cluster.api.openai.builders import limit_to_context
from cluster.api.openai.conversation import turns
from specdec.text.tokenizer import Tokenizer
from specdec.types.request import GenerateRequest
from specdec.types.sampling.sampling_params import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDED = json.loads((Path(__file__).parent / "claude_code.json").read_text())
HOSTED = "search on a server"
MESSAGES = [name for name in RECORDED["messages"] if name != HOSTED]
TEMPLATE = SimpleNamespace(options=lambda has_tools: {"reasoning_effort", "enable_thinking"})


def recorded(kind, name, *, short=False):
    """Return a body with the definitions of its tools. short: with one tool and no schema."""
    body = RECORDED[kind][name]
    tools = [RECORDED["tools"][each] if isinstance(each, str) else each for each in body["tools"]]
    if short:
        tools = [{**each, "input_schema": {"type": "object"}} for each in tools[-1:]]
    return {**body, "tools": tools}


def chat_of(name):
    return to_chat(MessagesRequest(**recorded("messages", name)), TEMPLATE)


@pytest.mark.parametrize("name", MESSAGES)
async def test_a_recorded_request_is_streamed_to_its_end(http, name):
    body = recorded("messages", name, short=True)
    response = await http.post("/v1/messages?beta=true", json={**body, "max_tokens": 12})
    assert response.status_code == 200, response.text
    events = [each.strip().split("\ndata: ") for each in response.text.strip().split("\n\n")]
    assert events[-1][0] == "event: message_stop"
    end = json.loads(events[-2][1])
    edits = {"applied_edits": []} if "context_management" in body else None
    assert end.get("context_management") == edits
    if name == "title":
        deltas = [json.loads(data) for kind, data in events if kind == "event: content_block_delta"]
        assert "".join(each["delta"]["text"] for each in deltas).startswith('{"title":"')


ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("name", MESSAGES)
async def test_a_template_with_alternating_roles_gets_a_text_after_a_result(
    http, router, tiny_model_dir, monkeypatch, name
):
    """Claude Code adds a reminder to the results of calls. Gemma has no message of the system."""
    template = Tokenizer(tiny_model_dir, ALTERNATING).chat_template
    monkeypatch.setattr(router.text.tokenizer, "chat_template", template)
    body = recorded("messages", name, short=True)
    call = {"type": "tool_use", "id": "c1", "name": "ask", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "bread"}
    reminder = {"type": "text", "text": "Be brief"}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": "Ask"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, reminder]},
    ]
    response = await http.post(
        "/v1/messages?beta=true", json={**body, "max_tokens": 4, "messages": turns}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", RECORDED["counts"])
async def test_recorded_counts_are_of_the_prompt(http, name):
    body = recorded("counts", name)
    response = await http.post("/v1/messages/count_tokens?beta=true", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["input_tokens"] > (100 if body["tools"] else 5)


async def test_a_search_on_a_server_is_refused_with_the_reason(http):
    response = await http.post("/v1/messages", json=recorded("messages", HOSTED))
    assert response.status_code == 400
    assert "tools[0].type" in response.json()["error"]["message"]
    assert "runs no tools" in response.json()["error"]["message"]


async def test_every_tool_of_the_client_is_accepted():
    body = {**recorded("messages", "first turn"), "tools": [*RECORDED["tools"].values()]}
    chat = to_chat(MessagesRequest(**body), TEMPLATE)
    assert [each.function.name for each in chat.tools] == [*RECORDED["tools"]]


async def test_the_prompt_has_what_is_for_the_model():
    made = turns(chat_of("after a call").messages)
    roles = ["system", "user", "system", "assistant", "tool"]
    assert [each["role"] for each in made] == roles
    assert "billing" not in made[0]["content"]
    assert made[3]["reasoning_content"]
    assert made[3]["tool_calls"][0]["function"]["name"] == "Bash"


async def test_effort_thinking_and_format_become_fields_of_the_chat():
    first, title = chat_of("first turn"), chat_of("title")
    assert first.reasoning_effort == "high"
    assert first.chat_template_kwargs == {"enable_thinking": True}
    assert title.chat_template_kwargs == {"enable_thinking": False}
    assert title.response_format.json_schema.json_schema["required"] == ["title"]


async def test_thinking_without_a_variable_of_the_template_is_one_that_is_ignored():
    plain = SimpleNamespace(options=lambda has_tools: frozenset())
    chat = to_chat(MessagesRequest(**recorded("messages", "first turn")), plain)
    assert (chat.reasoning_effort, chat.chat_template_kwargs) == ("high", {"enable_thinking": True})


@pytest.mark.parametrize(
    ("name", "text"),
    [("image in a result", "[omitted: the model reads text only]"), ("tool search", "WebFetch")],
)
async def test_results_that_are_no_text_have_a_note_or_a_name(name, text):
    [result] = [each for each in chat_of(name).messages if each.role == "tool"]
    assert result.content == text


async def test_strict_tools_keep_their_schema():
    tool = {**RECORDED["tools"]["Bash"], "strict": True}
    body = {**recorded("messages", "first turn"), "tools": [tool]}
    assert to_chat(MessagesRequest(**body), TEMPLATE).tools[0].function.strict


@pytest.mark.parametrize(("asked", "given"), [(64_000, 90), (90, 90), (7, 7), (None, None)])
async def test_max_tokens_is_limited_to_the_context(asked, given):
    call = GenerateRequest(prompt=tuple(range(10)), params=SamplingParams(max_tokens=asked))
    assert limit_to_context(call, 100).params.max_tokens == given
    assert limit_to_context(call, 10) is call  # a prompt that is too long is an error
    least = replace(call, params=SamplingParams(max_tokens=asked, min_tokens=7))
    assert limit_to_context(least, 16) is least  # as is too little room for the answer


async def test_an_answer_that_fills_the_context_has_its_own_reason(http):
    text = "Ask the baker " * 30
    body = {"model": "tiny", "max_tokens": 9999, "messages": [{"role": "user", "content": text}]}
    response = await http.post("/v1/messages", json={**body, "temperature": 0})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["stop_reason"] in ("model_context_window_exceeded", "end_turn")
    assert answer["stop_reason"] != "end_turn" or answer["usage"]["output_tokens"] < 512
