# Modules: cluster.api.openai.schemas.chat_schema
"""Chats over HTTP, down to the engine."""

import json
from dataclasses import replace

import pytest

from cluster.api.base.openai_schema import Usage
from cluster.api.openai.answer_reading import AnswerReading
from cluster.api.openai.chat import ChatWriter
from cluster.api.openai.conversation import tool_use
from cluster.api.openai.parsers.tool_format import TOOL_FORMATS
from cluster.api.openai.schemas.chat_schema import ChatCompletion, ChatRequest
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason
from tests.cluster.api.openai.conftest import events
from tests.cluster.api.openai.family_outputs import FAMILIES, Output

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


async def ask(http, **changes):
    response = await http.post(URL, json={**CHAT, **MORE, **changes})
    assert response.status_code == 200, response.text
    assert ChatCompletion.model_validate_json(response.content).to_json() == response.text
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
    assert (body["prompt_token_ids"], choice["token_ids"]) == (None, None)
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


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
async def test_usage_in_every_event_counts_what_was_sent(http, options):
    options = {"continuous_usage_stats": True, **options}
    body = {**CHAT, **MORE, "stream": True, "stream_options": options}
    usages = [each["usage"] for each in events(await http.post(URL, json=body))]
    assert [Usage(**each).to_dict() for each in usages] == usages
    counts = [each["completion_tokens"] for each in usages]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 12)
    assert len({each["prompt_tokens"] for each in usages}) == 1
    assert usages[0]["total_tokens"] == usages[0]["prompt_tokens"]


async def test_no_usage_where_it_is_not_included(http):
    options = {"continuous_usage_stats": True, "include_usage": False}
    body = {**CHAT, **MORE, "stream": True, "stream_options": options}
    assert not any("usage" in each for each in events(await http.post(URL, json=body)))


async def test_an_event_of_a_stream_has_one_choice(http):
    body = {**CHAT, **MORE, "stream": True, "n": 3, "return_token_ids": True}
    chunks = events(await http.post(URL, json=body))
    assert {len(each["choices"]) for each in chunks} == {1}
    roles = [each["choices"][0] for each in chunks if "role" in each["choices"][0]["delta"]]
    assert [each["index"] for each in roles] == [0, 1, 2]
    assert ["prompt_token_ids" in each for each in chunks] == [True] + [False] * (len(chunks) - 1)


async def test_fields_that_vllms_clients_read_are_null(http):
    assert (await ask(http))["prompt_logprobs"] is None
    body = (await http.post("/v1/completions", json={"prompt": "a b", "max_tokens": 1})).json()
    assert body["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize(("seed", "used"), [(-1, None), (-3, 2**63 - 3), (-(2**63), 0)])
async def test_a_negative_seed(http, seed, used):
    """vLLM's -1 requests a random seed."""
    seeds = [(await ask(http, seed=seed))["seed"] for _ in range(2)]
    assert (len(set(seeds)) == 2) if used is None else (seeds == [used] * 2)


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
        ({"structured_outputs": {"regex": "on(l)y"}, "guided_regex": "on(l)y"}, ("only",)),
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
async def test_a_forced_call_has_arguments_that_match_the_schema(http, unjoined, choice, stream):
    body = {
        **CHAT,
        **MORE,
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 100,
        "stream": stream,
    }
    body["parallel_tool_calls"] = False
    body["response_format"] = {"type": "json_object"}  # of an answer, which a call is not
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


async def test_a_call_that_is_cut_leaves_no_beginning_in_the_content():
    tools = [TOOL]
    request = ChatRequest(**{**CHAT, "tools": tools})
    use = tool_use(request, TOOL_FORMATS["qwen3_coder"], lambda text: False)
    text = "Let me ask.\n<tool_call>\n<function=ask>\n<parameter=who>\nba"
    for reason, content in ((FinishReason.LENGTH, "Let me ask."), (FinishReason.STOP, text)):
        writer = ChatWriter(0, request, AnswerReading(use, None), None)
        writer.add(EngineOutput("r", (1,), text, reason, 3, 5, SpeculationStats()))
        choice = writer.choice()
        assert choice["message"]["content"] == content
        assert choice["finish_reason"] == ("length" if reason is FinishReason.LENGTH else "stop")


@pytest.mark.parametrize("form", ["hermes", "gpt_oss"])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [('{"who": "river"}', "tool_calls"), ('{"who": "ri', "stop"), ('{"who": {}', "stop")],
)
async def test_calls_are_the_reason_only_if_the_last_one_is_complete(form, arguments, reason):
    request = ChatRequest(**{**CHAT, "tools": [TOOL]})
    reading = AnswerReading(tool_use(request, TOOL_FORMATS[form], lambda text: False), None)
    if form == "gpt_oss":
        reading = replace(reading, reasoning=form)
    call = FAMILIES[form][1](Output("", (("ask", {}),)))
    text = f"{call}{call[: call.index('{}')]}{arguments}"
    output = EngineOutput("r", (1,), text, FinishReason.STOP, 3, 5, SpeculationStats())
    whole, streamed = (ChatWriter(0, request, reading, None) for _ in range(2))
    whole.add(output)
    assert whole.choice()["finish_reason"] == streamed.delta(output)["finish_reason"] == reason


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
