# Modules: cluster.api.anthropic.routes
"""Anthropic's own client against the Messages API: messages, streams, tools, counts and errors."""

import httpx2
import pytest
import pytest_asyncio

from cluster.api.base.authentication import ApiKey, ApiKeys
from cluster.api.http_app import make_app
from tests.cluster.api.openai.conftest import alone

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Ask the baker"}]
# Clients from 2.0 on have no parameter for the temperature.
GREEDY = {"temperature": 0}
FIELDS = {"model": "tiny", "max_tokens": 16, "messages": MESSAGES, "extra_body": GREEDY}
TOOL = {
    "name": "ask",
    "input_schema": {
        "type": "object",
        "properties": {"who": {"enum": ["baker", "river"]}},
        "required": ["who"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def anthropic():
    """Return the package, whose import takes 2 s of each process that collects the tests."""
    import anthropic

    return anthropic


def client_of(anthropic, router, keys, api_key):
    transport = httpx2.ASGITransport(make_app(lambda: router, lambda: alone(router), lambda: keys))
    http = httpx2.AsyncClient(transport=transport, base_url="http://test")
    return anthropic.AsyncAnthropic(
        api_key=api_key, base_url="http://test", http_client=http, max_retries=0
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(anthropic, router):
    async with client_of(anthropic, router, ApiKeys(), "unused") as client:
        yield client


async def create(client, **changes):
    return await client.messages.create(**{**FIELDS, **changes})


async def test_a_message(client, anthropic):
    message = await create(client, system="Be brief.")
    assert isinstance(message, anthropic.types.Message)
    assert [each.type for each in message.content] == ["text"]
    assert message.content[0].text
    assert (message.role, message.stop_reason) == ("assistant", "max_tokens")
    assert message.usage.output_tokens == 16


async def test_a_stream_adds_up_to_the_message(client):
    whole = await create(client)
    async with client.messages.stream(**FIELDS) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert texts
    assert "".join(texts) == message.content[0].text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == 16


async def test_the_events_of_a_stream_are_those_of_the_client(client):
    events = await create(client, stream=True)
    kinds = [each.type async for each in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_of_a_tool_and_its_result(client, anthropic, is_streamed):
    changes = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "ask"}, "max_tokens": 150}
    if is_streamed:
        async with client.messages.stream(**{**FIELDS, **changes}) as stream:
            message = await stream.get_final_message()
    else:
        message = await create(client, **changes)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert call.name == "ask"
    assert call.input in ({"who": "baker"}, {"who": "river"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Bread is baked at five."}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = await create(client, messages=turns, tools=[TOOL], tool_choice={"type": "none"})
    assert answer.content[0].type == "text"


async def test_tokens_are_counted(client):
    counted = await client.messages.count_tokens(model="tiny", messages=MESSAGES)
    usage = (await create(client)).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_the_client_finds_the_request_id(client, anthropic):
    named = await create(client, extra_headers={"x-request-id": "mine"})
    assert named._request_id == "mine"
    with pytest.raises(anthropic.BadRequestError) as error:
        await create(client, max_tokens=0, extra_headers={"x-request-id": "mine"})
    assert error.value.request_id == "mine"
    async with client.messages.stream(**FIELDS) as stream:
        assert stream.request_id.startswith("req-")


async def test_errors_are_those_of_the_client(client, anthropic, router):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await create(client, max_tokens=0)
    with pytest.raises(anthropic.NotFoundError):
        await create(client, model="other")
    keys = ApiKeys([ApiKey("ann", "sk-correct-horse")])
    async with client_of(anthropic, router, keys, "sk-wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await create(stranger)
    async with client_of(anthropic, router, keys, "sk-correct-horse") as ann:
        assert (await create(ann)).content


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_runner_continues_without_a_thread(client, anthropic, is_streamed):
    """It asks for a conversation that the server stores; the refusal has to be of a known kind."""
    asked = []

    @anthropic.beta_async_tool(name="ask", input_schema=TOOL["input_schema"])
    async def ask(who):
        asked.append(who)
        return "Bread is baked at five."

    forced = {"tools": [ask], "tool_choice": {"type": "tool", "name": "ask"}, "max_tokens": 150}
    options = {"stream": is_streamed, "max_iterations": 2}
    runner = client.beta.messages.tool_runner(**{**FIELDS, **forced, **options})
    last = await runner.until_done()  # it is cut by the context, as the first call is in the prompt
    assert asked[0] in ("baker", "river")
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens > 300
