"""Chats that are too long, without their oldest messages."""

import json
import re

import pytest

from cluster.api.openai import chat
from cluster.api.openai.parsers.tool_format import TOOL_FORMATS
from cluster.api.openai.request_warnings import WARNINGS_HEADER
from cluster.api.openai.responses.truncation import chat_starts, lasting_start, messages_from
from cluster.api.openai.schemas.chat_schema import Message

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/responses"
ASKED = {"max_output_tokens": 8, "temperature": 0, "truncation": "auto"}
CONTEXT = 512
LONG = "Ask the baker who has seen the river, and the river. "
QUESTION = {"role": "user", "content": "Who?"}
TURNS = [
    {"role": role, "content": f"{LONG}{index}"}
    for index in range(30)
    for role in ("user", "assistant")
]
CALLS = [
    {"type": kind, "call_id": f"c{index}", **fields}
    for index in range(30)
    for kind, fields in (
        ("function_call", {"name": "ask", "arguments": json.dumps({"who": LONG})}),
        ("function_call_output", {"output": LONG}),
    )
]
SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["baker"]}},
    "required": ["who"],
    "additionalProperties": False,
}
GREETING = [{"role": "assistant", "content": LONG * 60}, QUESTION]


async def shortened(http, turns, **changes):
    """Return a response, and how many messages it is without."""
    response = await http.post(URL, json={**ASKED, "input": turns, **changes})
    assert response.status_code == 200, response.text
    found = re.search(
        r"truncation: the oldest (\d+) messages", response.headers.get(WARNINGS_HEADER, "")
    )
    return response.json(), int(found[1]) if found else 0


@pytest.mark.parametrize(
    ("turns", "first"),
    [([*TURNS, QUESTION], []), ([TURNS[0], *CALLS], TURNS[:1]), (GREETING, [])],
    ids=["turns", "calls after one message", "greeting"],
)
async def test_the_oldest_messages_are_left_out_on_request(http, turns, first):
    asked = {**ASKED, "input": turns, "instructions": "Be brief"}
    refused = await http.post(URL, json={**asked, "truncation": "disabled"})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    body, num_left_out = await shortened(http, turns, instructions="Be brief")
    assert 0 < num_left_out < len(turns) - len(first)
    kept = [*first, *turns[num_left_out + len(first) :]]
    asked = {"input": kept, "instructions": "Be brief", "truncation": "auto"}
    counted = await http.post(f"{URL}/input_tokens", json=asked)
    assert counted.json()["input_tokens"] == body["usage"]["input_tokens"]
    asked["input"] = turns
    counted = await http.post(f"{URL}/input_tokens", json=asked)
    assert counted.json()["input_tokens"] > CONTEXT, "of the whole input"


@pytest.mark.parametrize(
    ("limit", "least", "most"),
    [(None, CONTEXT // 4, CONTEXT), (8, 8, CONTEXT), (300, 300, CONTEXT)],
)
async def test_a_shortened_chat_leaves_room_for_the_output(http, limit, least, most):
    body, num_left_out = await shortened(http, [*TURNS, QUESTION], max_output_tokens=limit)
    num_tokens = body["usage"]["input_tokens"]
    assert num_left_out
    assert (CONTEXT - least) // 3 < num_tokens <= CONTEXT - least


@pytest.fixture
def encoded(router, monkeypatch):
    """Return the list to which each encoded chat is added."""
    chats, encode = [], router.text.encode_chat

    async def counted(chat, marks):
        chats.append(chat)
        return await encode(chat, marks)

    monkeypatch.setattr(router.text, "encode_chat", counted)
    return chats


async def test_a_chat_that_fits_is_encoded_once(http, encoded):
    assert (await shortened(http, TURNS[:5]))[1] == 0
    assert len(encoded) == 1


async def test_a_last_message_that_is_too_long_is_refused_after_two_tries(http, encoded):
    turns = [*TURNS, {"role": "user", "content": LONG * 60}]
    response = await http.post(URL, json={**ASKED, "input": turns})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert WARNINGS_HEADER not in response.headers
    assert len(encoded) == 2


async def test_a_last_message_that_leaves_less_than_a_quarter_is_answered(http, encoded):
    turns = [*TURNS, {"role": "user", "content": LONG * 21}]
    body, num_left_out = await shortened(http, turns, max_output_tokens=None)
    assert num_left_out == len(TURNS)
    assert CONTEXT * 3 // 4 < body["usage"]["input_tokens"] < CONTEXT
    assert len(encoded) == 2


async def test_ids_of_calls_count_those_that_are_left_out(http, monkeypatch):
    kimi = TOOL_FORMATS["kimi_k2"]
    monkeypatch.setattr(chat, "configured_tool_format", lambda config, template: kimi)
    tool = {"type": "function", "name": "ask", "parameters": SCHEMA, "strict": True}
    asked = {"tools": [tool], "tool_choice": {"type": "function", "name": "ask"}}
    turns = [TURNS[0], *CALLS[:6], *TURNS, QUESTION]
    body, num_left_out = await shortened(http, turns, max_output_tokens=40, **asked)
    assert num_left_out > 6
    assert [each["call_id"] for each in body["output"]] == ["functions.ask:3"]


async def test_a_cut_stays_for_several_turns(http):
    counts = []
    for num_turns in range(20, len(TURNS), 2):
        _, count = await shortened(http, [*TURNS[:num_turns], QUESTION])
        counts.append(count)
    assert counts == sorted(counts)
    assert len(set(counts)) <= len(counts) // 2, counts


def chat_of(shape):
    """Return the chat of a text: s(ystem), u(ser), a(nswer), c and d (calls), C and D (results)."""
    roles = {"s": "system", "u": "user", "C": "tool", "D": "tool"}
    return [
        Message(
            role=roles.get(each, "assistant"),
            content=str(place),
            tool_calls=[{"id": each, "function": {"name": "f", "arguments": "{}"}}]
            if each in "cd"
            else None,
            tool_call_id=each.lower() if each in "CD" else None,
        )
        for place, each in enumerate(shape)
    ]


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ("suausaCa", ["034567", "0347"]),
        ("suau", ["03"]),
        ("aau", ["2"]),
        ("Caua", ["23"]),
        ("ucuC", []),
        ("ucaC", []),
        ("ucuCa", ["24"]),
        ("ucCucdCDa", ["345678", "38"]),
        ("ucCcCa", ["0345", "05"]),
        ("cCaa", ["23", "3"]),
        ("su", []),
        ("a", []),
        ("susa", []),
    ],
)
async def test_the_shorter_chats_of_a_chat(shape, kept):
    messages = chat_of(shape)
    shorter = [messages_from(messages, start) for start in chat_starts(messages)]
    assert ["".join(each.content for each in left) for left in shorter] == kept


async def test_a_lasting_start_is_at_most_half_of_the_rest_later():
    for num_starts in range(1, 70):
        for index in range(num_starts):
            found = lasting_start(index, num_starts)
            assert index <= found <= index + (num_starts - index) // 2
