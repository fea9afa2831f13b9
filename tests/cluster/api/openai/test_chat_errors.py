"""Chats that are refused: the error names the field and its limit."""

import asyncio
import re

import openai
import pytest

from tests.cluster.api.openai.test_chat import CHAT, MORE, TOOL, URL, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

BROKEN_TOOL = {
    "type": "function",
    "function": {"name": "ask", "parameters": {"type": "object", "$ref": "#/nowhere"}},
}


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "from 0 to 100"),
        ({"temperature": "warm"}, "temperature", "a valid number"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": True}, "n", "integer"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 9999}, "max_tokens", "max_model_len"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "given"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "is 'image_url'; it must be 'text' or 'refusal': the served model reads text only",
        ),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"use_beam_search": True}, "use_beam_search", "beam search is not supported"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"chat_template": "x"}, "chat_template", "only the model's own template"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"9999": 1}}, "logit_bias.keys[0]", "from 0 to 382"),
        ({"top_logprobs": 2}, "top_logprobs", "unless logprobs"),
        ({"logprob_token_ids": [2]}, "logprob_token_ids", "unless logprobs"),
        ({"logprobs": True, "logprob_token_ids": [383]}, "logprob_token_ids[0]", "from 0 to 382"),
        ({"logprobs": True, "logprob_token_ids": [3] * 129}, "logprob_token_ids", "at most 128"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "from 0 to 20"),
        ({"truncation_side": "right"}, "truncation_side", "keeps its last tokens"),
        ({"stop_regex": "a+"}, "stop_regex", "use stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "unless stream"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "ask",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "unique"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "{'type': 'function', 'function': {'name': 'x'}}; it must be none or auto without",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "json_schema is None; it must be given with type json_schema",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
            "response_format.json_schema",
            "json_schema is {'name': 'a', 'schema': {}}; it must be given with type json_schema",
        ),
        (
            {"response_format": {"type": "text", "schema": {"type": "object"}}},
            "response_format.schema",
            "left out unless type is json_object; use json_schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "no type"}}},
            "response_format.schema",
            "can be enforced",
        ),
        (
            {"structured_outputs": {}},
            "structured_outputs",
            "is {}; it must be exactly one of json, json_object, regex, choice, grammar",
        ),
        (
            {"structured_outputs": {"json_object": False}},
            "structured_outputs",
            "is {'json_object': False}; it must be exactly one of json,",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
        (
            {"structured_outputs": {"choice": [], "regex": "a"}},
            "structured_outputs.choice",
            "at least 1 item",
        ),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs",
            "is ['json', 'regex']; it must be exactly one of json,",
        ),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"guided_regex": "("}, "guided_regex", "can be enforced"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "can be enforced"),
        ({"guided_json": "{"}, "guided_json", "can be enforced"),
        ({"max_tokens": 1000}, "max_tokens", "at most"),
        ({"max_tokens": None, "max_completion_tokens": 1000}, "max_completion_tokens", "at most"),
        ({"tools": [BROKEN_TOOL], "tool_choice": "required"}, "tools", "can be enforced"),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "structured_outputs",
            "one of response_format",
        ),
        (
            {"speculation": {"num_speculative_tokens": 33}},
            "speculation.num_speculative_tokens",
            "32",
        ),
        ({"speculation": {"method": "lookahead"}}, "speculation.method", "loaded"),
        (
            {"speculation": {"acceptance_threshold": "high"}},
            "speculation.acceptance_threshold",
            "a valid number or 'strict', 'medium' or 'lenient' or 'auto'",
        ),
        ({"speculation": {"k": 1}}, "speculation.k", "unknown field 'speculation.k'"),
        ({"priority": 1001}, "priority", "1000"),
        ({"priority": -11}, "priority", "from -10 to 1000"),
        ({"cache_salt": "x" * 129}, "cache_salt", "128"),
        ({"model": "x" * 257}, "model", "256"),
        (
            {"chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs.tools",
            "none",
        ),
        ({"request_id": "x" * 129}, "request_id", "128"),
        ({"stream_interval": 0}, "stream_interval", "from 1"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "left out"),
    ],
)
async def test_the_error_names_the_invalid_field_and_its_limit(http, changes, param, words):
    error = await refusal(http, **changes)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        (
            {"messages": [{"role": "user", "content": "x" * 2000}]},
            "messages",
            r"\d{4} tokens in the prompt\. messages length is \d{4}; it must be at most 511 ",
        ),
        (
            {"max_tokens": 510},
            "max_tokens",
            r"530 tokens \(20 in the prompt, 510 in the completion\)\. max_tokens is 510; it must ",
        ),
    ],
)
async def test_clients_recognize_that_the_context_length_is_exceeded(http, changes, param, words):
    """LangChain looks for the code in the message, LiteLLM for the sentence."""
    error = await refusal(http, **changes)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    known = r"This model's maximum context length is 512 tokens\. However, you requested "
    assert re.match(known + words, error["message"]), error["message"]
    assert error["message"].endswith(" (context_length_exceeded)")


async def test_an_unknown_model_is_not_found(http):
    response = await http.post(URL, json={**CHAT, **MORE, "model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_more_choices_than_the_queue_can_hold(http):
    assert (await refusal(http, n=128))["param"] == "n"


async def test_more_choices_than_free_places_in_the_queue(http):
    """Send three requests of 12 choices where 8 may run and 8 wait."""
    body = {**CHAT, "n": 12, "max_tokens": 60}
    client = openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="unused", max_retries=0, http_client=http
    )
    asked = (client.chat.completions.create(**body, extra_body=MORE) for _ in range(3))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [each for each in answers if isinstance(each, openai.RateLimitError)]
    assert len(refused) == 2
    assert {each.code for each in refused} == {"rate_limit_exceeded"}
    assert {each.response.headers["retry-after"] for each in refused} == {"1"}


async def test_the_client_retries_after_the_hint(http):
    client = openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="unused", max_retries=3, http_client=http
    )
    body = {**CHAT, "n": 12, "max_tokens": 30}
    asked = (client.chat.completions.create(**body, extra_body=MORE) for _ in range(2))
    answers = await asyncio.gather(*asked)
    assert [len(each.choices) for each in answers] == [12, 12]
