# Modules: cluster.api.openai.schemas.responses_schema
"""Requests of the Responses API over HTTP, down to the engine."""

import json

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/responses"
ASKED = {"model": "tiny", "input": "Ask the baker", "max_output_tokens": 8, "temperature": 0}


async def ask(http, **changes):
    response = await http.post(URL, json={**ASKED, **changes})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(http, **changes):
    response = await http.post(URL, json={**ASKED, **changes, "stream": True})
    assert response.status_code == 200, response.text
    pairs = [each.strip().split("\n") for each in response.text.strip().split("\n\n")]
    parsed = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {each['type']}" for each in parsed]
    return parsed


async def test_the_answer_is_that_of_the_chat(http):
    chat = {"messages": [{"role": "user", "content": "Ask the baker"}], "max_tokens": 8}
    chat = (await http.post("/v1/chat/completions", json={**chat, "temperature": 0})).json()
    body = await ask(http, metadata={"whose": "mine"})
    assert body["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (body["object"], body["status"]) == ("response", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert body["usage"]["output_tokens"] == 8
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}  # numbers alone
    assert body["usage"]["speculation"]["is_lossless"]
    assert (body["error"], body["metadata"]) == (None, {"whose": "mine"})


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "input_text", "text": 3}, "P.text is 3; it must be a valid string"),
        ({"type": "input_text"}, "P.text is None; it must be given"),
        ({"type": "input_text", "text": "a", "refusal": "a"}, "unknown field 'P.refusal'"),
        ({"type": "refusal"}, "P.refusal is None; it must be given"),
        ({"type": "refusal", "refusal": 3}, "P.refusal is 3; it must be a valid string"),
        ({"type": "refusal", "refusal": "a", "text": "a"}, "unknown field 'P.text'"),
        ({"type": "refusal", "refusals": "a", "refusal": "a"}, "did you mean refusal?"),
        ({"type": "input_image"}, "P.type is 'input_image'; it must be 'input_text', "),
        ("a", "P is 'a'; it must be a JSON object"),
    ],
)
async def test_the_error_of_a_part_names_its_field(http, part, error):
    sent = {**ASKED, "input": [{"role": "assistant", "content": [part]}]}
    response = await http.post(URL, json=sent)
    message = response.json()["error"]["message"].replace("input[0].content[0]", "P")
    assert (response.status_code, error in message) == (400, True), message
    assert "did you mean text" not in message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "output_text", "text": "Whom?", "annotations": []},
        {"type": "refusal", "refusal": "Whom?"},  # of another model
    ],
    ids=["text", "refusal"],
)
async def test_instructions_and_earlier_turns(http, part):
    turns = [
        {"role": "user", "content": "Ask the baker"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "The baker"}]},
    ]
    body = await ask(http, input=turns, instructions="Be brief")
    chat = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Ask the baker"},
        {"role": "assistant", "content": "Whom?"},
        {"role": "user", "content": "The baker"},
    ]
    counted = (await http.post("/tokenize", json={"messages": chat})).json()
    assert body["usage"]["input_tokens"] == counted["count"]


async def test_a_stream_has_the_answer_in_increments(http):
    whole = await ask(http)
    events = await stream(http)
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(each["delta"] for each in events[4:-4]) == events[-4]["text"] == text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert events[-1]["response"]["usage"] is not None
    assert events[0]["response"]["output"] == []


async def test_a_schema_is_enforced(http):
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    body = await ask(http, text={"format": form}, max_output_tokens=40)
    assert json.loads(body["output"][0]["content"][0]["text"]) == {"a": "b"}
    assert (body["status"], body["incomplete_details"]) == ("completed", None)


async def test_log_probabilities(http):
    include = ["message.output_text.logprobs"]
    body = await ask(http, include=include, top_logprobs=2)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 8
    assert {len(each["top_logprobs"]) for each in logprobs} == {2}
    deltas = [each for each in await stream(http, include=include) if "delta" in each]
    assert sum(len(each["logprobs"]) for each in deltas) == 8


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": "x" * 2000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0]"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name"),
        ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"truncation": "last"}, "truncation"),
        ({"n": 2}, "n"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "name": "f",
                        "parameters": {"properties": {"a": {"$ref": "#/b"}}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_the_error_names_the_invalid_field(http, changes, param):
    response = await http.post(URL, json={**ASKED, **changes})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("item", "words", "reason"),
    [
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "a"}]},
            "input[0].content[0].type is 'input_image'; it must be",
            ": the served model reads text only",
        ),
        (
            {"type": "input_image", "image_url": "a"},
            "input[0] is {'type': 'input_image'",
            ": the served model reads text only",
        ),
        (
            {"type": "item_reference", "id": "msg_1"},
            "input[0] is {'type': 'item_reference'",
            ": nothing is stored; clients send the items themselves if store is false",
        ),
        ({"type": "file_search_call"}, "input[0] is", ", custom_tool_call_output"),
    ],
)
async def test_other_items_are_refused_with_the_reason(http, item, words, reason):
    response = await http.post(URL, json={**ASKED, "input": [item]})
    message = response.json()["error"]["message"]
    assert response.status_code == 400
    assert words in message
    assert message.endswith(reason)


async def test_the_sampling_fields_of_vllm_reach_the_engine(http, tokenizer):
    eos = {"logit_bias": {str(tokenizer.end_token_id): 100}}
    body = await ask(http, **eos)
    assert (body["status"], body["usage"]["output_tokens"]) == ("completed", 1)
    assert (await ask(http, **eos, min_tokens=3))["usage"]["output_tokens"] == 4
    shown = await ask(http, **eos, ignore_eos=True, skip_special_tokens=False)
    assert (shown["status"], shown["usage"]["output_tokens"]) == ("incomplete", 8)
    text = tokenizer.decode([tokenizer.end_token_id] * 8, skip_special_tokens=False)
    assert shown["output"][0]["content"][0]["text"] == text


async def test_the_stop_string_is_kept_on_request(http):
    text = (await ask(http))["output"][0]["content"][0]["text"]
    stop = text[2:4]
    end = text.index(stop)
    for keeps, length in ((False, end), (True, end + len(stop))):
        body = await ask(http, stop=stop, include_stop_str_in_output=keeps)
        assert body["output"][0]["content"][0]["text"] == text[:length]


async def test_structured_outputs_are_those_of_the_chat(http):
    body = await ask(http, structured_outputs={"choice": ["yes", "no"]})
    assert body["output"][0]["content"][0]["text"] in ("yes", "no")
    sent = {**ASKED, "structured_outputs": {"regex": "("}}
    error = (await http.post(URL, json=sent)).json()["error"]
    assert error["param"] == "structured_outputs.regex"


async def test_the_request_id_of_the_body_is_used(http):
    assert (await ask(http, request_id="mine"))["id"] == "resp_mine"
