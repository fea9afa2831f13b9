# Modules: cluster.api.openai.responses.output, cluster.api.openai.responses.tools
"""OpenAI's own client against the Responses API, and the items of pieces of answers."""

import json
from unittest.mock import Mock

import httpx2
import openai
import pytest
import pytest_asyncio

from cluster.api.base.authentication import ApiKeys
from cluster.api.http_app import make_app
from cluster.api.openai.answer_reading import AnswerReader, AnswerReading
from cluster.api.openai.logprobs import TokenLogprob
from cluster.api.openai.parsers.harmony import HarmonyParser
from cluster.api.openai.parsers.pieces import CallArguments, CallStart, Content, Reasoning
from cluster.api.openai.parsers.tool_families import tool_parser
from cluster.api.openai.parsers.tool_format import HERMES, Tool
from cluster.api.openai.responses.builder import ResponsesBuilder
from cluster.api.openai.responses.output import OutputItems
from cluster.api.openai.responses.tools import custom_arguments, custom_input
from cluster.api.openai.schemas.response_items import CustomTool, FunctionTool, placed_tools
from cluster.api.openai.schemas.responses_schema import ResponsesRequest
from specdec.types.responses import FinishReason
from tests.cluster.api.openai.conftest import alone

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = {"model": "tiny", "input": "Ask the baker", "temperature": 0}
TOOL = {
    "type": "function",
    "name": "ask",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"who": {"enum": ["baker", "river"]}},
        "required": ["who"],
        "additionalProperties": False,
    },
}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "ask"}}
TOOLS = [FunctionTool(type="function", name="ask"), CustomTool(type="custom", name="patch")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(router):
    transport = httpx2.ASGITransport(make_app(lambda: router, lambda: alone(router), ApiKeys))
    http = httpx2.AsyncClient(transport=transport, base_url="http://test")
    yield openai.AsyncOpenAI(
        api_key="unused", base_url="http://test/v1", http_client=http, max_retries=0
    )


async def test_a_stream_adds_up_to_the_response(client):
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": {**schema, "additionalProperties": False}}
    whole = await client.responses.create(**ASKED, text={"format": form})
    async with client.responses.stream(**ASKED, text={"format": form}) as stream:
        kinds = [each.type async for each in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text == '{"a":"b"}'
    assert kinds[-1] == "response.completed"


async def test_a_call_and_its_result(client):
    whole = await client.responses.create(**ASKED, **FORCED)
    async with client.responses.stream(**ASKED, **FORCED) as stream:
        kinds = [each.type async for each in stream]
        final = await stream.get_final_response()
    [call] = final.output
    assert (whole.status, final.status) == ("completed", "completed")
    assert whole.output[0].arguments == call.arguments
    assert json.loads(call.arguments) in ({"who": "baker"}, {"who": "river"})
    assert {"response.function_call_arguments.delta", "response.output_item.done"} <= {*kinds}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Bread."}
    asked = {**ASKED, "input": [{"role": "user", "content": "Ask"}, *whole.output, result]}
    answer = await client.responses.create(**asked, tools=[TOOL], tool_choice="none")
    assert answer.output[0].type == "message"
    assert answer.tool_choice == "none"


async def test_a_schema_of_the_answer_leaves_room_for_calls(client):
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": {**schema, "additionalProperties": False}}
    answer = await client.responses.create(**ASKED, text={"format": form}, tools=[TOOL])
    if answer.output[0].type == "message":
        assert json.loads(answer.output_text) == {"a": "b"}
    else:
        assert {each.name for each in answer.output} == {"ask"}


async def test_tokens_are_counted(client):
    counted = await client.responses.input_tokens.count(model="tiny", input="Ask", tools=[TOOL])
    assert counted.input_tokens > 20


async def test_stored_responses_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="nothing is stored"):
        await client.responses.create(**ASKED, previous_response_id="resp_1")


def changes_of(*pieces, is_complete=True):
    output = OutputItems("r", placed_tools(TOOLS))
    changes = [*output.add(pieces), *output.finish(is_complete=is_complete)]
    return output.items, changes


async def test_pieces_of_all_kinds_become_items_one_after_the_other():
    arguments = custom_arguments("begin")
    items, changes = changes_of(
        Reasoning("Hm"), Reasoning("."), Content("I ask."),
        CallStart(0, "ask"), CallArguments(0, "{"), CallArguments(0, "}"),
        CallStart(1, "patch", "c1"), CallArguments(1, arguments),
    )  # fmt: skip
    assert [each.type for each in items] == [
        "reasoning", "message", "function_call", "custom_tool_call",
    ]  # fmt: skip
    reasoning, message, call, patch = items
    assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "I ask.")
    assert (call.arguments, patch.input, patch.call_id) == ("{}", "begin", "c1")
    assert {each.status for each in items} == {"completed"}
    kinds = [kind for kind, fields in changes if fields["output_index"] == 0]
    assert kinds == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    indices = [fields["output_index"] for _, fields in changes]
    assert indices == sorted(indices)


@pytest.mark.parametrize("reasoning", [{"summary": "auto"}, {"generate_summary": "detailed"}])
async def test_the_summary_of_reasoning_is_its_text(reasoning):
    assert ResponsesRequest(**ASKED, reasoning=reasoning).has_summary
    assert not ResponsesRequest(**ASKED, reasoning={"effort": "low"}).has_summary
    output = OutputItems("r", (), has_summary=True)
    changes = [*output.add([Reasoning("Hm"), Reasoning(".")]), *output.finish(is_complete=True)]
    [item] = output.items
    assert (item.summary[0].text, item.content[0].text) == ("Hm.", "Hm.")
    shown = [(kind, fields) for kind, fields in changes if "summary" in kind]
    assert [kind.removeprefix("reasoning_summary_") for kind, _ in shown] == [
        "part.added", "text.delta", "text.delta", "text.done", "part.done",
    ]  # fmt: skip
    assert "".join(fields.get("delta", "") for _, fields in shown) == shown[3][1]["text"] == "Hm."
    assert all((each["item_id"], each["summary_index"]) == (item.id, 0) for _, each in shown)
    assert changes[-1][1]["item"]["summary"] == [{"type": "summary_text", "text": "Hm."}]


async def test_a_call_that_is_cut_is_incomplete():
    items, changes = changes_of(CallStart(0, "ask"), CallArguments(0, '{"a'), is_complete=False)
    assert (items[0].status, items[0].arguments) == ("incomplete", '{"a')
    assert changes[-1][1]["item"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("{}", "completed"), ('{"a', "incomplete"), ('{"a": {}', "incomplete")],
)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_a_call_is_incomplete_if_its_braces_are_not_closed(arguments, status, reason):
    builder = ResponsesBuilder.__new__(ResponsesBuilder)
    parser = tool_parser(HERMES, [Tool("ask", {})])
    tools = Mock(parser=lambda: parser, identified=lambda start: start)
    builder._reader = AnswerReader(AnswerReading(tools, None))
    builder.meter, builder._output = Mock(), OutputItems("r", placed_tools(TOOLS))
    text = f'<tool_call>{{"name": "ask", "arguments": {arguments}'
    output = Mock(text=text, text_lengths=(), token_ids=(1,), logprobs=None)
    output.finish_reason = reason
    changes = [*builder._changes(Mock(output=output))]
    assert changes[-1][1]["item"]["status"] == status
    assert builder._output.items[0].arguments == arguments


@pytest.mark.parametrize("name", ["ask", "patch"])
async def test_a_call_in_which_the_service_fails_has_what_came_of_it(name):
    output = OutputItems("r", placed_tools(TOOLS))
    assert [*output.add([CallStart(0, name), CallArguments(0, '{"a')])]
    output.interrupt()
    [call] = output.items
    given = call.arguments if name == "ask" else call.input
    assert (call.status, given) == ("incomplete", '{"a')


CALL = ["<tool", "_call>", "\n", '{"name": "ask", ', '"arguments": {', "}}", "\n</tool_call>"]


@pytest.mark.parametrize(
    ("call", "end"), [(CALL, ["\n", "Do", "ne ", "now"]), (CALL[:3], []), (CALL[:5], [])]
)
async def test_each_message_has_the_log_probabilities_of_its_tokens(call, end):
    output = OutputItems("r", placed_tools(TOOLS))
    parser = tool_parser(HERMES, [Tool("ask")])
    for token in ["Hi", "", " you", *call, *end]:
        logprob = TokenLogprob(token=token, logprob=0.0, bytes=[], top_logprobs=[])
        [*output.add([*parser.feed(token)], [(logprob, token)])]
    [*output.add([*parser.finish(is_cut=not end)])]
    [*output.finish(is_complete=bool(end))]
    messages = [each.content[0] for each in output.items if each.type == "message"]
    assert len(messages) == (2 if end else 1)
    found = [[each.token for each in message.logprobs] for message in messages]
    assert found == [["Hi", "", " you"], ["\n", "Do", "ne ", "now"]][: len(messages)]
    assert [each.text for each in messages] == ["".join(tokens) for tokens in found]


@pytest.mark.parametrize(
    "tokens",
    [
        ["a", " ", "b "],
        ["a ", "b"],
        ["a", " <", "b> "],
        ["a", " ", "<", " ", "b"],
        ["x", "<", "<", "b"],
        ["std", " <", "<", " y"],
        ["<t", "<t", "b"],
    ],
)
async def test_a_message_has_the_log_probabilities_of_withheld_tokens(tokens):
    output, parser = OutputItems("r", placed_tools(TOOLS)), tool_parser(HERMES, [])
    for token in tokens:
        logprob = TokenLogprob(token=token, logprob=0.0, bytes=[], top_logprobs=[])
        [*output.add([*parser.feed(token)], [(logprob, token)])]
    [*output.add([*parser.finish()]), *output.finish(is_complete=True)]
    [message] = output.items
    assert [each.token for each in message.content[0].logprobs] == tokens


@pytest.mark.parametrize(
    "before", [[], ["<|ch", "an", "nel|>", "final", "<|message|>", "Hi", "<|end|>"]]
)
async def test_a_mark_may_contain_the_text_after_it(before):
    output, parser = OutputItems("r", placed_tools(TOOLS)), HarmonyParser()
    header = ["<|start|>", "assist", "ant"] if before else []
    for token in [*before, *header, "<|ch", "an", "nel|>", "final", "<|message|>", "an", "t"]:
        logprob = TokenLogprob(token=token, logprob=0.0, bytes=[], top_logprobs=[])
        [*output.add([*parser.feed(token)], [(logprob, token)])]
    [*output.add([*parser.finish()]), *output.finish(is_complete=True)]
    [message] = output.items
    found = [each.token for each in message.content[0].logprobs]
    assert found == [*before[5:6], "an", "t"]


async def test_an_empty_answer_is_an_empty_message():
    items, changes = changes_of()
    assert [each.content[0].text for each in items] == [""]
    assert "output_text.delta" not in [kind for kind, _ in changes]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (custom_arguments("ä\n"), "ä\n"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "a', '{"input": "a'),
        ("[]", "[]"),
    ],
)
async def test_the_input_of_a_custom_tool(arguments, text):
    assert custom_input(arguments) == text
