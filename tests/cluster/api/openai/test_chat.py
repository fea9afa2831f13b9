"""Chats over HTTP, down to the engine."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest

from tests.cluster.api.openai.conftest import events

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/chat/completions"
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Ask the baker"}],
    "max_tokens": 12,
    "temperature": 0,
}
MORE = {"ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "ask",
        "parameters": {
            "type": "object",
            "properties": {"who": {"enum": ["baker", "river"]}},
            "required": ["who"],
            "additionalProperties": False,
        },
    },
}

BROKEN_TOOL = {
    "type": "function",
    "function": {"name": "ask", "parameters": {"type": "object", "$ref": "#/nowhere"}},
}


async def ask(http, **changes):
    response = await http.post(URL, json={**CHAT, **MORE, **changes})
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(http, **changes):
    response = await http.post(URL, json={**CHAT, **MORE, **changes})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_an_answer(http, tokenizer):
    body = await ask(http)
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    text = "<|im_start|>user\nAsk the baker<|im_end|>\n<|im_start|>assistant\n"
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(tokenizer.encode(text, add_special_tokens=False))
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


async def test_a_stream_is_the_answer_in_pieces(http):
    whole = await ask(http, return_token_ids=True)
    response = await http.post(
        URL,
        json={
            **CHAT,
            **MORE,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        },
    )
    first, *chunks, last = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    deltas = [chunk["choices"][0] for chunk in chunks]
    text = "".join(each["delta"].get("content", "") for each in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    token_ids = [token for each in deltas for token in each["token_ids"]]
    assert token_ids == whole["choices"][0]["token_ids"]
    assert [each["finish_reason"] for each in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)
    assert {chunk["id"] for chunk in (first, *chunks, last)} == {first["id"]}
    assert all(chunk["usage"] is None for chunk in (first, *chunks))


async def test_usage_in_every_event(http):
    options = {"continuous_usage_stats": True}
    response = await http.post(
        URL, json={**CHAT, **MORE, "stream": True, "stream_options": options}
    )
    counts = [each["usage"]["completion_tokens"] for each in events(response)]
    assert counts == sorted(counts)
    assert counts[-1] == 12


async def test_speculation_changes_the_statistics_and_not_the_answer(http):
    repeating = [{"role": "user", "content": "river river river river river river"}]
    by_options = {}
    for name, options in {
        "off": {"enabled": False},
        "ngram": {"method": "ngram", "num_speculative_tokens": 2},
        "none": {"num_speculative_tokens": 0},
    }.items():
        body = await ask(http, messages=repeating, speculation=options, max_tokens=40)
        details = body["usage"]["completion_tokens_details"]["speculation"]
        by_options[name] = (body["choices"][0]["message"]["content"], details)
    assert len({text for text, _ in by_options.values()}) == 1
    assert by_options["off"][1]["num_drafts"] == by_options["none"][1]["num_drafts"] == 0
    drafted = by_options["ngram"][1]
    assert 0 < drafted["num_draft_tokens"] <= 2 * drafted["num_drafts"]
    assert (drafted["verifier"], drafted["is_lossless"]) == ("coupled", True)


async def test_the_seed_determines_the_choices_and_is_returned(http):
    hot = {"temperature": 1.0, "n": 3}
    first = await ask(http, **hot)
    again = await ask(http, **hot, seed=first["seed"])
    texts = [each["message"]["content"] for each in first["choices"]]
    assert [each["message"]["content"] for each in again["choices"]] == texts
    assert [each["index"] for each in first["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert first["usage"]["completion_tokens"] == 36


async def test_a_repeated_prompt_is_cached(http):
    long = [{"role": "user", "content": "count the days until the ice breaks " * 3}]
    first = await ask(http, messages=long, cache_salt="cached")
    again = await ask(http, messages=long, cache_salt="cached")
    other = await ask(http, messages=long, cache_salt="another")
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, again)]
    assert cached[0] == 0 < cached[1] < again["usage"]["prompt_tokens"]
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_logprobs_have_each_token_and_the_most_likely(http):
    body = await ask(http, logprobs=True, top_logprobs=3, prompt_logprobs=1, return_token_ids=True)
    positions = body["choices"][0]["logprobs"]["content"]
    assert len(positions) == 12
    for position in positions:
        assert position["logprob"] == position["top_logprobs"][0]["logprob"] < 0  # greedy
        assert len(position["top_logprobs"]) == 3
        assert bytes(position["bytes"]).decode(errors="replace") == position["token"]
    assert b"".join(bytes(each["bytes"]) for each in positions).decode(errors="replace")
    prompt = body["prompt_logprobs"]
    assert prompt[0] is None
    later = zip(body["prompt_token_ids"][1:], prompt[1:], strict=True)
    assert all(str(token) in position for token, position in later)
    plain = await ask(http, logprobs=True)
    assert [each["token"] for each in plain["choices"][0]["logprobs"]["content"]] == [
        each["token"] for each in positions
    ]
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    ids = await ask(http, logprobs=True, return_tokens_as_token_ids=True)
    assert ids["choices"][0]["logprobs"]["content"][0]["token"] == (
        f"token_id:{body['choices'][0]['token_ids'][0]}"
    )


async def test_stop_strings_end_the_text_and_are_returned(http):
    whole = (await ask(http))["choices"][0]["message"]["content"]
    stop = whole[4:6]
    body = (await ask(http, stop=stop))["choices"][0]
    assert body["message"]["content"] == whole[: whole.index(stop)]
    assert (body["finish_reason"], body["stop_reason"]) == ("stop", stop)
    kept = await ask(http, stop=[stop], include_stop_str_in_output=True)
    assert kept["choices"][0]["message"]["content"].endswith(stop)


async def test_only_a_biased_token_is_generated(http, tokenizer):
    [token] = tokenizer.encode("e", add_special_tokens=False)
    body = await ask(http, logit_bias={str(token): 100}, max_tokens=3, allowed_token_ids=[token, 9])
    assert body["choices"][0]["message"]["content"] == "eee"


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 0}}},
        {"structured_outputs": {"json": 0}},
        {"guided_json": 0},
    ],
    ids=["response_format", "structured_outputs", "guided_json"],
)
async def test_an_answer_matches_its_schema(http, form):
    schema = {
        "type": "object",
        "properties": {"who": {"enum": ["baker", "river"]}, "old": {"type": "boolean"}},
        "required": ["who", "old"],
        "additionalProperties": False,
    }
    filled = json.loads(json.dumps(form).replace("0", json.dumps(schema)))
    body = await ask(http, **filled, max_tokens=60)
    answer = json.loads(body["choices"][0]["message"]["content"])
    assert answer["who"] in ("baker", "river")
    assert isinstance(answer["old"], bool)
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"guided_choice": ["baker", "river"]}, ("baker", "river")),
        ({"guided_regex": "ba(k|n)er"}, ("baker", "baner")),
        ({"guided_grammar": 'start: "a" | "b"'}, ("a", "b")),
        ({"structured_outputs": {"choice": ["only"]}}, ("only",)),
        ({"structured_outputs": {"regex": "on(l)y"}}, ("only",)),
        ({"structured_outputs": {"grammar": 'start: "only"'}}, ("only",)),
    ],
)
async def test_an_answer_matches_other_structures(http, form, texts):
    body = await ask(http, **form)
    assert body["choices"][0]["message"]["content"] in texts


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "ask"}}], ids=["any", "named"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_has_arguments_that_match_the_schema(http, choice, stream):
    body = {
        **CHAT,
        **MORE,
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 100,
        "stream": stream,
    }
    body["parallel_tool_calls"] = False
    response = await http.post(URL, json=body)
    assert response.status_code == 200, response.text
    if stream:
        deltas = [each["choices"][0] for each in events(response)]
        calls = [call for each in deltas for call in each["delta"].get("tool_calls", [])]
        named = [call for call in calls if call["function"].get("name")]
        assert len(named) == 1
        assert len(calls) > 2, "arguments come in pieces"
        name = named[0]["function"]["name"]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        reason = deltas[-1]["finish_reason"]
    else:
        [answer] = response.json()["choices"]
        assert answer["message"]["content"] is None
        [call] = answer["message"]["tool_calls"]
        assert call["id"].startswith("call_")
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        reason = answer["finish_reason"]
    assert (name, reason) == ("ask", "tool_calls")
    assert json.loads(arguments)["who"] in ("baker", "river")


async def test_tools_are_in_the_prompt_unless_choice_is_none(http):
    plain = await ask(http)
    with_tools = await ask(http, tools=[TOOL])
    hidden = await ask(http, tools=[TOOL], tool_choice="none")
    assert with_tools["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    assert hidden["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


async def test_a_chat_with_tool_results_is_answered(http):
    call = {"id": "call_1", "type": "function", "function": {"name": "ask", "arguments": "{}"}}
    turns = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "bread"},
    ]
    assert (await ask(http, messages=turns))["choices"][0]["message"]["content"]


async def test_the_last_message_is_continued(http):
    turns = [*CHAT["messages"], {"role": "assistant", "content": "The baker"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    body = await ask(http, messages=turns, **options)
    echoed = await ask(http, messages=turns, echo=True, **options)
    text = body["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == "The baker" + text


async def test_a_prompt_is_truncated_on_request(http):
    body = await ask(http, truncate_prompt_tokens=5, return_token_ids=True)
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"]) == 5


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
            "'text'",
        ),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"use_beam_search": True}, "use_beam_search", "beam search is not supported"),
        ({"functions": []}, "functions", "use tools"),
        ({"chat_template": "x"}, "chat_template", "only the model's own template"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"9999": 1}}, "logit_bias.keys[0]", "from 0 to 382"),
        ({"top_logprobs": 2}, "top_logprobs", "unless logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "unless stream"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "ask",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "unique"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "given"),
        ({"guided_regex": "("}, "guided_regex", "can be enforced"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "can be enforced"),
        ({"guided_json": "{"}, "guided_json", "can be enforced"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "none"),
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
        ({"speculation": {"k": 1}}, "speculation.k", "the field is unknown"),
        ({"priority": 1001}, "priority", "1000"),
        ({"priority": -11}, "priority", "from -10 to 1000"),
        ({"cache_salt": "x" * 129}, "cache_salt", "128"),
        ({"model": "x" * 257}, "model", "256"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
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


async def test_the_error_of_a_too_long_prompt_has_its_own_code(http):
    error = await refusal(http, messages=[{"role": "user", "content": "x" * 2000}])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


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


async def test_predicted_output_changes_speed_alone(http):
    plain = await ask(http, max_tokens=40)
    text = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    for content in (text, parts):
        body = await ask(http, max_tokens=40, prediction={"type": "content", "content": content})
        assert body["choices"] == plain["choices"]
        details = body["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 5
        assert (
            details["accepted_prediction_tokens"] <= details["speculation"]["num_accepted_tokens"]
        )
    details = plain["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


async def test_a_wrong_prediction_is_rejected_token_by_token(http):
    plain = await ask(http)
    wrong = {"type": "content", "content": "wholly different words, again and again"}
    body = await ask(http, prediction=wrong)
    assert body["choices"] == plain["choices"]
    assert body["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


async def test_a_prediction_is_given_once_and_is_text(http):
    prediction = {"type": "content", "content": "a"}
    both = await refusal(http, prediction=prediction, speculation={"prediction": "b"})
    assert "left out where prediction is given" in both["message"]
    empty = await refusal(http, prediction={"type": "content", "content": ""})
    assert empty["param"] == "prediction.content"
    other = await refusal(http, prediction={"type": "audio", "content": "a"})
    assert other["param"] == "prediction.type"


async def test_reasoning_is_a_separate_field(http, router, monkeypatch):
    plain = (await ask(http, max_tokens=20))["choices"][0]["message"]["content"]
    config = replace(router.config, reasoning_parser="deepseek_r1")
    monkeypatch.setattr(router, "config", config)
    message = (await ask(http, max_tokens=20))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (plain.strip(), "")
    hidden = (await ask(http, max_tokens=20, include_reasoning=False))["choices"][0]["message"]
    assert "reasoning_content" not in hidden
    json_only = await ask(http, max_tokens=20, guided_choice=["yes", "no"])
    assert json_only["choices"][0]["message"]["content"] in ("yes", "no")
    response = await http.post(URL, json={**CHAT, **MORE, "max_tokens": 20, "stream": True})
    deltas = [each["choices"][0]["delta"] for each in events(response)]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == plain.strip()
    assert not any(each.get("content") for each in deltas)


async def test_a_response_has_no_reasoning(http, router, monkeypatch):
    config = replace(router.config, reasoning_parser="deepseek_r1")
    monkeypatch.setattr(router, "config", config)
    body = {"input": "Ask the baker", "max_output_tokens": 16, "temperature": 0}
    response = await http.post("/v1/responses", json=body)
    assert response.json()["output"][0]["content"][0]["text"] == ""


async def test_a_thinking_budget_ends_the_reasoning(http, router, tokenizer, monkeypatch):
    config = replace(router.config, reasoning_parser="deepseek_r1")
    monkeypatch.setattr(router, "config", config)
    closing = tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    changes = {"max_tokens": 90, "return_token_ids": True, "thinking_token_budget": 12}
    plain = (await ask(http, max_tokens=12, return_token_ids=True))["choices"][0]
    body = await ask(http, **changes)
    [choice] = body["choices"]
    assert choice["token_ids"][:12] == plain["token_ids"]
    assert choice["token_ids"][12 : 12 + len(closing)] == closing
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"] == 90
    assert choice["message"]["reasoning_content"] == plain["message"]["reasoning_content"]
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    counted = body["usage"]["completion_tokens_details"]["speculation"]
    assert counted["num_drafts"] > 0
    response = await http.post(URL, json={**CHAT, **MORE, **changes, "stream": True})
    deltas = [each["choices"][0]["delta"] for each in events(response)]
    assert "".join(each.get("content") or "" for each in deltas) == choice["message"]["content"]


async def test_an_answer_that_a_message_begins_is_not_reasoning(http, router, monkeypatch):
    config = replace(router.config, reasoning_parser="deepseek_r1")
    monkeypatch.setattr(router, "config", config)
    messages = [*CHAT["messages"], {"role": "assistant", "content": "The baker"}]
    body = await ask(http, messages=messages, continue_final_message=True)
    message = body["choices"][0]["message"]
    assert message["content"]
    assert "reasoning_content" not in message


async def test_a_budget_beyond_the_answer_changes_nothing(http, router, monkeypatch):
    config = replace(router.config, reasoning_parser="deepseek_r1")
    monkeypatch.setattr(router, "config", config)
    plain = await ask(http, max_tokens=9)
    for budget in (9, 400):
        body = await ask(http, max_tokens=9, thinking_token_budget=budget)
        assert body["choices"] == plain["choices"]


async def test_a_budget_that_leaves_no_token_for_an_answer(http, router, monkeypatch):
    config = replace(router.config, reasoning_parser="deepseek_r1")
    monkeypatch.setattr(router, "config", config)
    body = await ask(http, max_tokens=10, thinking_token_budget=9)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == ""
    assert body["usage"]["completion_tokens"] == 9


async def test_a_budget_needs_a_parser_of_reasoning(http, router, monkeypatch):
    error = await refusal(http, thinking_token_budget=9)
    assert "unless the service has a reasoning parser" in error["message"]
    config = replace(router.config, reasoning_parser="qwen3")
    monkeypatch.setattr(router, "config", config)
    assert "where n is given" in (await refusal(http, thinking_token_budget=9, n=2))["message"]
    error = await refusal(http, thinking_token_budget=0)
    assert error["param"] == "thinking_token_budget"
