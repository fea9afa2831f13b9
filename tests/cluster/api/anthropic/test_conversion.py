"""Requests of the Messages API as chats."""

import pytest

from cluster.api.anthropic import conversion
from cluster.api.anthropic.conversion import to_chat
from cluster.api.anthropic.schema import CountTokensRequest, MessagesRequest
from specdec.types.errors import InvalidValueError

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/messages"
COUNT = f"{URL}/count_tokens"
MESSAGES = [{"role": "user", "content": "Ask the baker"}]
TOOL = {"name": "ask", "input_schema": {"type": "object"}}


class Template:
    def options(self, *, has_tools):
        return frozenset({"enable_thinking"})


async def test_a_call_is_no_beginning_of_an_answer():
    call = {"type": "tool_use", "id": "a", "name": "ask", "input": {}}
    content = [{"type": "text", "text": "I ask."}, call]
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    request = MessagesRequest(max_tokens=1, messages=messages)
    assert not to_chat(request, None).continue_final_message


NO_TEXT = {"type": "text", "text": ""}
NO_THOUGHT = {"type": "thinking", "thinking": "", "signature": "a"}


@pytest.mark.parametrize(
    "contents",
    [
        [""],
        [[NO_TEXT]],
        [[NO_TEXT, NO_TEXT]],
        [[NO_THOUGHT]],
        [[NO_THOUGHT, NO_TEXT]],
        ["", [NO_TEXT], [NO_THOUGHT], ""],
    ],
)
async def test_an_empty_beginning_of_an_answer_changes_nothing(http, contents):
    """It was a turn of the prompt, which the model had ended without a word."""
    turns = [*MESSAGES, *({"role": "assistant", "content": each} for each in contents)]
    counts = [
        (await http.post(COUNT, json={"messages": each})).json()["input_tokens"]
        for each in (turns, MESSAGES)
    ]
    assert counts[0] == counts[1]
    with pytest.raises(InvalidValueError, match="messages"):
        to_chat(CountTokensRequest(messages=turns[1:]), None)


async def test_empty_blocks_add_nothing_to_a_message():
    thought, text = {**NO_THOUGHT, "thinking": "Hm."}, {**NO_TEXT, "text": "The baker"}
    plain, padded = [thought, text], [NO_THOUGHT, thought, NO_THOUGHT, NO_TEXT, text, NO_TEXT]
    chats = [
        to_chat(CountTokensRequest(messages=[{"role": "assistant", "content": each}]), None)
        for each in (plain, padded)
    ]
    assert chats[0] == chats[1]
    assert chats[0].continue_final_message
    system = [NO_TEXT, {**NO_TEXT, "text": "Be brief."}, NO_TEXT]
    [given, _] = to_chat(CountTokensRequest(system=system, messages=MESSAGES), None).messages
    assert given.content == "Be brief."


async def test_every_block_of_a_conversation_is_converted():
    request = MessagesRequest(
        max_tokens=9,
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Ask."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Whom?", "signature": "x"},
                    {"type": "text", "text": "I ask."},
                    {"type": "tool_use", "id": "t1", "name": "ask", "input": {"who": "baker"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "Closed.",
                     "is_error": True},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    )  # fmt: skip
    chat = to_chat(request, Template())
    assert [each.role for each in chat.messages] == [
        "system", "user", "assistant", "tool", "user",
    ]  # fmt: skip
    assert [each.content for each in chat.messages] == [
        "Be\nbrief.", "Ask.", "I ask.", "Error: Closed.", "And now?",
    ]  # fmt: skip
    assert chat.messages[2].reasoning_content == "Whom?"
    assert chat.messages[2].tool_calls[0].function.arguments == '{"who": "baker"}'
    assert chat.messages[3].tool_call_id == "t1"
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert (chat.parallel_tool_calls, chat.max_completion_tokens) == (False, 9)


def request_of(path, **fields):
    return {"model": "tiny", **fields} | ({"max_tokens": 9} if path == URL else {})


async def test_results_of_calls_count_as_messages():
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "a"}
    message = {"role": "user", "content": [result] * 600}
    request = MessagesRequest(max_tokens=9, messages=[message] * 2)
    with pytest.raises(InvalidValueError, match="messages length is 1200"):
        to_chat(request, Template())


async def test_too_many_calls_in_a_message_are_refused(http):
    call = {"type": "tool_use", "id": "t", "name": "ask", "input": {}}
    messages = [*MESSAGES, {"role": "assistant", "content": [call] * 129}]
    for url in (URL, COUNT):
        response = await http.post(url, json=request_of(url, messages=messages))
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert message.startswith("messages[1].content length is 129; it must be from 0 to 128")


@pytest.mark.parametrize("path", [URL, COUNT])
@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{**TOOL, "input_schema": {"type": "string"}}], "tools[0].input_schema.type"),
        ([TOOL, TOOL], "tools[1].name"),
    ],
)
async def test_the_error_of_a_tool_has_the_name_that_was_sent(http, path, tools, field):
    response = await http.post(path, json=request_of(path, messages=MESSAGES, tools=tools))
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field} is ")


async def test_what_a_chat_does_not_accept_is_an_invalid_value(monkeypatch):
    monkeypatch.setattr(conversion, "_tool_choice", lambda request: {"tool_choice": "often"})
    with pytest.raises(InvalidValueError, match=r"^tool_choice is 'often'; it must be"):
        to_chat(MessagesRequest(max_tokens=9, messages=MESSAGES), Template())


@pytest.mark.parametrize(
    "choice", [None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "ask"}]
)
async def test_a_budget_ends_reasoning_also_before_forced_calls(choice):
    request = MessagesRequest(
        max_tokens=9,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice=choice,
        thinking={"type": "enabled", "budget_tokens": 99},
    )
    assert to_chat(request, Template(), has_parser=True).thinking_token_budget == 99
