# Modules: cluster.api.sglang.schema
"""SGLang's native API: the calls of its frontend language, as `RuntimeEndpoint` makes them.

The bodies and the fields that are read are those of python/sglang/lang/backend/runtime_endpoint.py
in SGLang 0.5.23; the package itself is not installed.
"""

import asyncio
import json
import threading

import numpy as np
import pytest

from cluster.api.sglang import generate
from specdec.types.messages import Logprobs

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Ask the baker"
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
FROM_FRONTEND = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "stop_regex": [],
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "regex": None,
    "json_schema": None,
    **GREEDY,
}
"""All that `SglSamplingParams.to_srt_kwargs` sends."""


async def post(http, **body):
    response = await http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(http, **body):
    response = await http.post("/generate", json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def gen(http, text, **params):
    """Continue a text like `sgl.gen`; return the completion and its `meta_info`."""
    found = await post(http, text=text, sampling_params={**FROM_FRONTEND, **params})
    return found["text"], found["meta_info"]


async def test_an_answer_has_sglangs_fields(http, tokenizer):
    found = await post(http, text=PROMPT, sampling_params=GREEDY, rid="mine")
    meta = found["meta_info"]
    assert found["text"] == tokenizer.decode(found["output_ids"])
    assert (meta["id"], meta["prompt_tokens"]) == ("mine", len(tokenizer.encode(PROMPT)))
    assert meta["completion_tokens"] == len(found["output_ids"]) == 8
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert 0 < meta["e2e_latency"] < 60
    assert "input_token_logprobs" not in meta


async def test_turns_build_on_each_other(http):
    text = PROMPT
    for _ in range(3):
        completion, meta = await gen(http, text)
        assert meta["completion_tokens"] == 8
        text += completion
    assert meta["cached_tokens"] > 0


async def test_forks_run_at_the_same_time(http):
    parts = await asyncio.gather(*(gen(http, f"{PROMPT} {index}") for index in range(3)))
    alone = [await gen(http, f"{PROMPT} {index}") for index in range(3)]
    assert [text for text, _ in parts] == [text for text, _ in alone]


async def test_ids_in_place_of_a_text(http, tokenizer):
    by_text = await post(http, text=PROMPT, sampling_params=GREEDY)
    by_ids = await post(http, input_ids=tokenizer.encode(PROMPT), sampling_params=GREEDY)
    assert by_ids["output_ids"] == by_text["output_ids"]


async def test_a_batch_is_a_list(http):
    params = [{**GREEDY, "max_new_tokens": count} for count in (3, 5)]
    found = await post(http, text=[PROMPT, "Every spring"], sampling_params=params, rid=["a", "b"])
    assert [len(each["output_ids"]) for each in found] == [3, 5]
    assert [each["meta_info"]["id"] for each in found] == ["a", "b"]
    [one] = await post(http, text=[PROMPT], sampling_params=GREEDY)
    assert (
        one["output_ids"] == (await post(http, text=PROMPT, sampling_params=GREEDY))["output_ids"]
    )


async def test_choices_of_a_prompt_are_a_list(http):
    params = {**GREEDY, "n": 2, "temperature": 1.0, "sampling_seed": 5}
    first, second = await post(http, text=PROMPT, sampling_params=params)
    assert first["output_ids"] != second["output_ids"]
    assert await post(http, text=PROMPT, sampling_params=params) is not None


@pytest.mark.parametrize(
    ("params", "accepts"),
    [
        ({"regex": r"[-+]?[0-9]+[ \n]*", "stop": [" ", "\n"]}, lambda text: int(text) is not None),
        ({"regex": "(yes|no)"}, lambda text: text in ("yes", "no")),
        ({"json_schema": '{"enum": ["a", "b"]}'}, lambda text: json.loads(text) in ("a", "b")),
        ({"json_schema": {"enum": [1, 2]}}, lambda text: json.loads(text) in (1, 2)),
        ({"ebnf": 'root ::= "x" | "y"'}, lambda text: text in ("x", "y")),
    ],
    ids=["int", "regex", "json_schema", "schema object", "ebnf"],
)
async def test_structured_output(http, params, accepts):
    text, meta = await gen(http, PROMPT, max_new_tokens=24, ignore_eos=False, **params)
    assert accepts(text)
    assert meta["finish_reason"]["type"] == "stop" or "[0-9]" in params.get("regex", "")


async def test_a_stream_has_the_text_so_far(http, unjoined):
    body = {"text": PROMPT, "sampling_params": FROM_FRONTEND, "stream": True}
    response = await http.post("/generate", json=body)
    lines = [line for line in response.text.split("\n") if line.startswith("data:")]
    assert lines.pop() == "data: [DONE]"
    position, text = 0, ""
    for line in lines:
        found = json.loads(line[5:])
        chunk = found["text"][position:]
        position, text = position + len(chunk), text + chunk
    assert text == (await gen(http, PROMPT))[0]
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    reasons = [json.loads(line[5:])["meta_info"]["finish_reason"] for line in lines]
    assert reasons[:-1] == [None] * (len(lines) - 1) != []


async def test_a_streamed_batch_has_indices(http):
    body = {"text": [PROMPT, "Every spring"], "sampling_params": GREEDY, "stream": True}
    response = await http.post("/generate", json=body)
    lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
    last = {(found := json.loads(line[5:]))["index"]: found for line in lines}
    whole = await post(http, text=[PROMPT, "Every spring"], sampling_params=GREEDY)
    assert [last[index]["text"] for index in (0, 1)] == [each["text"] for each in whole]


async def streamed(http, **body):
    response = await http.post("/generate", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line[5:]) for line in lines]


@pytest.mark.parametrize("start", [-1, 0, 2])
async def test_a_stream_has_the_logprobs_of_the_prompt_once(http, unjoined, start):
    body = {"text": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    body |= {"logprob_start_len": start, "top_logprobs_num": 2, "token_ids_logprob": [7, 3]}
    whole = (await post(http, **body))["meta_info"]
    events = [each["meta_info"] for each in await streamed(http, **body)]
    assert len(events) > 1
    for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
        assert [each.get(name) for each in events] == [whole[name], *[None] * (len(events) - 1)]
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        assert events[-1][name] == whole[name]
        sizes = [len(each[name]) for each in events]
        assert sizes == [each["completion_tokens"] for each in events]


async def test_each_choice_of_a_stream_has_the_logprobs_of_the_prompt(http):
    body = {"text": PROMPT, "sampling_params": {**GREEDY, "n": 2}, "return_logprob": True}
    body["logprob_start_len"] = 0
    events = await streamed(http, **body)
    whole = await post(http, **body)
    for index in (0, 1):
        found = [each["meta_info"].get("input_token_logprobs") for each in events
                 if each["index"] == index]  # fmt: skip
        expected = whole[index]["meta_info"]["input_token_logprobs"]
        assert [each for each in found if each is not None] == [expected]


async def test_the_logprobs_of_a_stream_are_limited_like_those_of_an_answer(
    http, unjoined, monkeypatch
):
    monkeypatch.setattr(generate, "MAX_ANSWER_LOGPROBS", 20)
    body = {"text": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    body["top_logprobs_num"] = 2
    for stream in (False, True):
        error = await refusal(http, **body, stream=stream)
        assert error["param"] == "top_logprobs_num"
        assert error["message"].endswith("lower it, max_new_tokens or n")
        assert "at most 20 in all" in error["message"]
    assert len(await streamed(http, **{**body, "top_logprobs_num": 1})) > 1


@pytest.mark.parametrize(
    ("changes", "num_logprobs"),
    [
        ({"text": [PROMPT] * 3}, 3 * 8),
        ({"text": [PROMPT] * 3, "top_logprobs_num": 2}, 3 * 3 * 8),
        ({"sampling_params": {**GREEDY, "n": 2}, "logprob_start_len": 0}, 2 * (8 + 5)),
        ({"sampling_params": {"max_new_tokens": 0}}, 5),
        ({"logprob_start_len": 3}, 8 + 2),
        ({"text": [PROMPT] * 2, "token_ids_logprob": [[7, 3], None]}, (3 + 1) * 8),
    ],
)
async def test_logprobs_are_limited_over_all_prompts_and_answers(
    http, monkeypatch, changes, num_logprobs
):
    body = {"text": PROMPT, "sampling_params": GREEDY, "return_logprob": True, **changes}
    monkeypatch.setattr(generate, "MAX_ANSWER_LOGPROBS", num_logprobs)
    await post(http, **body)
    monkeypatch.setattr(generate, "MAX_ANSWER_LOGPROBS", num_logprobs - 1)
    assert (await refusal(http, **body))["param"] == "top_logprobs_num"


@pytest.mark.parametrize("stream", [False, True])
async def test_large_answers_are_encoded_off_the_event_loop(http, unjoined, monkeypatch, stream):
    threads = []
    describe = generate.Answer._meta

    def meta(self):
        threads.append(threading.current_thread() is threading.main_thread())
        return describe(self)

    monkeypatch.setattr(generate.Answer, "_meta", meta)
    body = {"text": PROMPT, "sampling_params": GREEDY, "stream": stream}
    for changes, is_on_loop in (({}, {True}), ({"return_logprob": True}, {False})):
        threads.clear()
        assert (await http.post("/generate", json=body | changes)).status_code == 200
        assert set(threads) == is_on_loop
    monkeypatch.setattr(generate, "MANY_IDS", 5)
    threads.clear()
    await http.post("/generate", json=body)
    assert set(threads) == ({True, False} if stream else {True})


async def test_a_prefix_is_cached_without_an_answer(http):
    found = await post(http, text=PROMPT * 4, sampling_params={"max_new_tokens": 0})
    assert (found["text"], found["output_ids"]) == ("", [])
    assert found["meta_info"]["completion_tokens"] == 0
    again = await post(http, text=PROMPT * 4, sampling_params={"max_new_tokens": 0})
    assert again["meta_info"]["cached_tokens"] > 0


def normalized(entries):
    values = [entry[0] for entry in entries if entry[0]]
    return sum(values) / len(values)


async def test_select_takes_the_likeliest_choice(http, tokenizer):
    """The calls of `RuntimeEndpoint.select`, and what it reads of their answers."""
    choices = [" water", " the", " xyz"]
    common = await post(http, text=PROMPT, sampling_params={"max_new_tokens": 0})
    num_tokens = common["meta_info"]["prompt_tokens"]
    start = max(num_tokens - 2, 0)
    found = await post(
        http,
        text=[PROMPT + choice for choice in choices],
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=start,
    )
    for each, choice in zip(found, choices, strict=True):
        entries = each["meta_info"]["input_token_logprobs"]
        token_ids = tokenizer.encode(PROMPT + choice)
        assert [entry[1] for entry in entries] == token_ids[start:]
        assert all(entry[0] < 0 for entry in entries)
        assert "".join(entry[2] for entry in entries).endswith(choice)
        assert each["meta_info"]["output_token_logprobs"] == []
    scores = [normalized(each["meta_info"]["input_token_logprobs"]) for each in found]
    ids = [[entry[1] for entry in each["meta_info"]["input_token_logprobs"]] for each in found]
    unconditional = await post(
        http, input_ids=ids, sampling_params={"max_new_tokens": 0}, return_logprob=True
    )
    for each, token_ids in zip(unconditional, ids, strict=True):
        entries = each["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == token_ids
        assert [entry[0] is None for entry in entries] == [True] + [False] * (len(entries) - 1)
    assert len({round(score, 6) for score in scores}) == 3


async def test_logprobs_are_those_of_the_openai_api(http):
    found = await post(
        http,
        text=PROMPT,
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    meta = found["meta_info"]
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    other = (await http.post("/v1/completions", json={**body, "echo": True})).json()
    listed = other["choices"][0]["logprobs"]["token_logprobs"]
    entries = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert [entry[0] for entry in entries] == pytest.approx(listed)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == found["output_ids"]
    assert all(entry[2] is None for entry in entries)
    assert meta["input_top_logprobs"][0] is None
    assert {len(each) for each in meta["output_top_logprobs"]} == {2}


@pytest.mark.parametrize("start", [-1, 0, 2])
async def test_listed_tokens_have_their_logprobs_at_each_position(http, start):
    body = {"text": [PROMPT] * 2, "sampling_params": GREEDY, "return_logprob": True}
    body |= {"top_logprobs_num": 20, "logprob_start_len": start}
    listed = [[7, 380, 3], [12]]
    answers = await post(http, **body, token_ids_logprob=listed)
    plain = await post(http, **body)
    for answer, without, token_ids in zip(answers, plain, listed, strict=True):
        meta = answer["meta_info"]
        for part in ("input", "output"):
            positions = meta[f"{part}_token_ids_logprobs"]
            likely = meta[f"{part}_top_logprobs"]
            assert likely == without["meta_info"][f"{part}_top_logprobs"]
            assert len(positions) == len(meta[f"{part}_token_logprobs"])
            for tokens, best in zip(positions, likely, strict=True):
                if best is None:
                    assert tokens is None
                    continue
                assert [token for _, token, _ in tokens] == token_ids
                values = {token: value for value, token, _ in best}
                assert all(values.get(token, best[-1][0]) >= value for value, token, _ in tokens)
    assert "output_token_ids_logprobs" not in plain[0]["meta_info"]


async def test_an_impossible_token_has_a_number():
    """JSON has no minus infinity."""
    logprobs = Logprobs(np.array([[7, 9]]), np.array([[-np.inf, -0.5]], np.float32), np.array([3]))
    options = generate.PromptOptions((7,), 1, (), 0, False, False, False)
    entries = generate.Answer(None, options, None)._entries(logprobs)
    assert entries == [[(-9999.0, 7, None), (-0.5, 9, None)]]


async def test_logprobs_of_an_answer_list_the_last_token_of_the_prompt_alone(http, tokenizer):
    found = await post(http, text=PROMPT, sampling_params=GREEDY, return_logprob=True)
    last = tokenizer.encode(PROMPT)[-1]
    assert found["meta_info"]["input_token_logprobs"] == [[None, last, None]]
    assert len(found["meta_info"]["output_token_logprobs"]) == 8


async def test_a_stop_string_is_matched(http):
    text, _ = await gen(http, PROMPT)
    stop = text[3:6]
    found = await post(http, text=PROMPT, sampling_params={**GREEDY, "stop": stop})
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop not in found["text"]
    kept = {**GREEDY, "stop": [stop], "no_stop_trim": True}
    assert (await post(http, text=PROMPT, sampling_params=kept))["text"].endswith(stop)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "text", "given, or left out with input_ids"),
        ({"text": ""}, "text", "from 1 to"),
        ({"text": "a", "input_ids": [1]}, "text", "given, or left out with input_ids"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.top_p", "at most 1"),
        ({"text": "a", "sampling_params": {"stop_regex": ["b"]}}, "sampling_params.stop_regex",
         "left out: use stop"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens",
         "did you mean max_new_tokens"),
        ({"text": "a", "sampling_params": {"logit_bias": {"b": 1.0}}},
         "sampling_params.logit_bias", "keyed by token ids"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid", "the number of prompts: 2"),
        ({"text": "a", "image_data": "b"}, "image_data", "the models read text only"),
        ({"input_ids": [10**6]}, "text[0]", "from 0 to"),
        ({"text": "a", "input_ids": None, "sampling_params": {"max_new_tokens": 512}},
         "sampling_params.max_new_tokens", "This model's maximum context length is 512 tokens."),
        ({"input_ids": [5] * 600}, "text", "This model's maximum context length is 512 tokens."),
        ({"text": ["a"] * 17}, "text", "17 prompts with 17 choices in all"),
        ({"text": "a", "token_ids_logprob": [5, 999], "return_logprob": True},
         "token_ids_logprob[1]", "from 0 to 382"),
        ({"text": "a", "token_ids_logprob": [1] * 129, "return_logprob": True},
         "token_ids_logprob", "at most 128"),
        ({"text": "a", "token_ids_logprob": [[1], 2], "return_logprob": True},
         "token_ids_logprob", "token ids, or lists of them"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1]], "return_logprob": True},
         "token_ids_logprob", "the number of prompts: 2"),
        ({"text": "a", "top_logprobs_num": 99, "return_logprob": True}, "top_logprobs_num",
         "from 0 to 20"),
    ],
)  # fmt: skip
async def test_the_error_names_the_field(http, body, param, message):
    error = await refusal(http, **body)
    assert error["param"] == param
    assert message in error["message"]


async def test_an_unknown_adapter_is_refused(http):
    response = await http.post("/generate", json={"text": "a", "lora_path": "other"})
    assert response.status_code == 404
    assert "'other' is not served" in response.json()["error"]["message"]
