# Modules: cluster.api.openai.responses.input, cluster.api.openai.schemas.response_items
"""Requests that Codex sends, as recorded from it; prose and most tools are left out."""

import json
from pathlib import Path

import pytest

from cluster.api.openai.responses.input import as_chat
from cluster.api.openai.responses.tools import offered_tools
from cluster.api.openai.schemas.responses_schema import ResponsesRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDED = json.loads((Path(__file__).parent / "codex.json").read_text())


def recorded(name, *, short=False):
    """Return a body with the definitions of its tools. short: with one tool and no schema."""
    body = RECORDED["responses"][name]
    tools = [RECORDED["tools"][each] for each in body.get("tools", ())]
    if short:
        hosted = [each for each in tools if each["type"] == "web_search"]
        tools = [{**each, "parameters": None} for each in tools[:1]] + hosted
    return {**body, "tools": tools}


def chat_of(name, **changes):
    request = ResponsesRequest(**{**recorded(name), **changes})
    return as_chat(request, offered_tools(request))


async def stream(http, body):
    response = await http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    pairs = [each.strip().split("\ndata: ") for each in response.text.strip().split("\n\n")]
    parsed = [json.loads(data) for _, data in pairs]
    assert [kind for kind, _ in pairs] == [f"event: {each['type']}" for each in parsed]
    assert [each["sequence_number"] for each in parsed] == [*range(len(parsed))]
    return parsed


@pytest.mark.parametrize("name", RECORDED["responses"])
async def test_a_recorded_request_is_streamed_to_its_end(http, name):
    body = recorded(name, short=True)
    events = await stream(http, {**body, "max_output_tokens": 12})
    response = events[-1]["response"]
    kinds = ["response.created", "response.in_progress", "response.output_item.added"]
    assert [each["type"] for each in events[:3]] == kinds
    assert response["status"] in ("completed", "incomplete")
    assert "web_search" not in [each["type"] for each in response["tools"]]
    if name == "schema of the answer":
        without = {**body, "max_output_tokens": 12, "tool_choice": "none"}
        [answer] = (await stream(http, without))[-1]["response"]["output"]
        assert answer["content"][0]["text"].startswith('{"a":"')


@pytest.mark.parametrize("name", RECORDED["responses"])
async def test_input_tokens_are_counted(http, name):
    response = await http.post("/v1/responses/input_tokens", json=recorded(name))
    assert response.status_code == 200, response.text
    assert response.json()["object"] == "response.input_tokens"
    assert response.json()["input_tokens"] > 10


async def test_the_items_of_an_answer_are_one_message():
    messages = chat_of("after a call").messages
    assert [each.role for each in messages[-3:]] == ["user", "assistant", "tool"]
    answer, result = messages[-2:]
    assert (answer.reasoning_content, answer.tool_calls[0].function.name) == (
        "I think",
        "exec_command",
    )
    assert (result.tool_call_id, result.content) == (answer.tool_calls[0].id, "hi")


async def test_answers_one_after_the_other_are_several_messages():
    call = {"type": "function_call", "name": "get_goal", "arguments": "{}"}
    items = [
        {"type": "message", "role": "assistant", "content": "First."},
        {**call, "call_id": "a"},
        {**call, "call_id": "b"},
        {"role": "assistant", "content": "Second."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Third."},
        {"role": "user", "content": "Go on."},
    ]
    messages = chat_of("first turn", input=items).messages
    shapes = [(each.content, len(each.tool_calls or ()), each.reasoning_content)
              for each in messages]  # fmt: skip
    assert shapes == [
        ("First.", 2, None),
        ("Second.", 0, None),
        ("Third.", 0, "Hm."),
        ("Go on.", 0, None),
    ]


async def test_reasoning_in_several_items_is_of_one_answer():
    part = {"type": "reasoning_text", "text": "Hm."}
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    shown = {"type": "reasoning", "summary": [], "content": [part]}
    items = [hidden, shown, shown, {"role": "assistant", "content": "I call."}, hidden]
    call = {"type": "function_call", "name": "get_goal", "arguments": "{}", "call_id": "a"}
    messages = chat_of("first turn", input=[*items, call, hidden]).messages
    [answer] = [each for each in messages if each.role == "assistant"]
    assert (answer.content, len(answer.tool_calls)) == ("I call.", 1)
    assert answer.reasoning_content == "Hm.\nHm."


async def test_namespaces_and_custom_tools_are_functions_of_the_chat():
    chat = chat_of("call in a namespace")
    assert chat.messages[-2].tool_calls[0].function.name == "multi_agent_v1__close_agent"
    assert "multi_agent_v1__close_agent" in [each.function.name for each in chat.tools]
    chat = chat_of("custom tool")
    [patch] = [each.function for each in chat.tools if each.function.name == "apply_patch"]
    assert list(patch.parameters["properties"]) == ["input"]
    assert 'start: "begin"' in patch.description
    written = json.loads(chat.messages[-2].tool_calls[0].function.arguments)
    assert written == {"input": "begin\nend"}


async def test_items_may_have_the_fields_that_clients_add_to_them():
    """OpenAI's client parses an answer; Haystack names the sender."""
    text = {"type": "output_text", "text": "{}", "annotations": [], "parsed": {"a": 1}}
    call = {"type": "function_call", "name": "get_goal", "arguments": "{}", "call_id": "a"}
    items = [
        {"role": "user", "content": "Hi.", "name": "ann"},
        {"type": "message", "role": "assistant", "content": [text]},
        {**call, "parsed_arguments": {"a": 1}},
    ]
    hosted = ["web_search_call.action.sources", "code_interpreter_call.outputs"]
    user, answer = chat_of("first turn", input=items, include=hosted).messages[-2:]
    assert (user.content, user.name) == ("Hi.", "ann")
    assert (answer.content, answer.tool_calls[0].function.arguments) == ("{}", "{}")


async def test_an_image_in_a_result_is_noted():
    assert (
        chat_of("image in a result").messages[-1].content == "[omitted: the model reads text only]"
    )


async def test_options_are_passed_to_the_template():
    assert chat_of("options of reasoning").reasoning_effort == "high"
    chat = chat_of("custom tool")
    assert (chat.reasoning_effort, chat.verbosity) == ("medium", "low")


async def test_allowed_tools_are_the_only_ones():
    choice = {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "function", "name": "exec_command"}]}  # fmt: skip
    chat = chat_of("first turn", tool_choice=choice)
    assert [each.function.name for each in chat.tools] == ["exec_command"]
    assert chat.tool_choice == "required"


@pytest.mark.parametrize(
    ("tool", "named", "kind"),
    [
        ("get_goal", {"name": "get_goal"}, "function_call"),
        (
            "multi_agent_v1",
            {"name": "close_agent", "namespace": "multi_agent_v1"},
            "function_call",
        ),
        ("apply_patch", {"name": "apply_patch"}, "custom_tool_call"),
    ],
)
async def test_a_required_call_is_an_item_with_its_events(http, tool, named, kind):
    offered = dict(RECORDED["tools"][tool])
    if "tools" in offered:
        offered["tools"] = [each for each in offered["tools"] if each["name"] == named["name"]]
    choice = {"type": "custom" if kind == "custom_tool_call" else "function", **named}
    body = {"model": "tiny", "input": "Hi.", "stream": True, "temperature": 0}
    tools = {"tools": [offered, {"type": "web_search"}], "tool_choice": choice}
    events = await stream(http, {**body, **tools})
    [item] = events[-1]["response"]["output"]
    assert item["type"] == kind
    assert item.items() >= named.items()
    name = "function_call_arguments" if kind == "function_call" else "custom_tool_call_input"
    field = "arguments" if kind == "function_call" else "input"
    middle = [each for each in events if each["type"].startswith(f"response.{name}")]
    assert "".join(each.get("delta", "") for each in middle) == item[field] == middle[-1][field]
    assert {each["item_id"] for each in middle} == {item["id"]}
    done = events[-2]
    assert (done["type"], done["item"]) == ("response.output_item.done", item)
    assert [each["type"] for each in events[-1]["response"]["tools"]] == [offered["type"]]
