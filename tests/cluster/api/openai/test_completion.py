"""Plain completions over HTTP, down to the engine."""

from itertools import pairwise

import httpx
import pytest
from tokenizers.normalizers import NFC
from tokenizers.processors import TemplateProcessing

from cluster.api.base.authentication import ApiKey, ApiKeys
from cluster.api.http_app import make_app
from cluster.api.openai.schemas.completion_schema import Completion
from specdec.types.errors import OverloadedError
from specdec.types.request import Caller
from tests.cluster.api.openai.conftest import alone, events

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/completions"
TEXT = "The river begins"
ASKED = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


async def ask(http, **changes):
    response = await http.post(URL, json={**ASKED, **changes})
    assert response.status_code == 200, response.text
    assert Completion.model_validate_json(response.content).to_json() == response.text
    return response.json()


async def test_token_ids_are_null_unless_requested(http):
    [choice] = (await ask(http))["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (None, None)


async def test_a_text_and_its_tokens_have_the_same_completion(http, tokenizer):
    body = await ask(http, return_token_ids=True)
    [choice] = body["choices"]
    assert body["object"] == "text_completion"
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 8)
    ids = tokenizer.encode(TEXT)
    assert choice["prompt_token_ids"] == ids
    assert (await ask(http, prompt=ids))["choices"][0]["text"] == choice["text"]


async def test_choices_of_several_prompts_are_in_order(http):
    texts = ["The river", "The baker", "Every spring"]
    alone = [(await ask(http, prompt=each, seed=3, temperature=1, n=2)) for each in texts]
    together = await ask(http, prompt=texts, seed=3, temperature=1, n=2)
    assert [each["index"] for each in together["choices"]] == [*range(6)]
    assert [each["text"] for each in together["choices"]] == [
        each["text"] for one in alone for each in one["choices"]
    ]
    totals = [one["usage"]["prompt_tokens"] for one in alone]
    assert together["usage"]["prompt_tokens"] == sum(totals)
    assert together["usage"]["completion_tokens"] == 48


async def test_equal_prompts_have_different_texts_unless_a_seed_is_given(http):
    hot = {"prompt": [TEXT, TEXT], "temperature": 1.5, "max_tokens": 16}
    body = await ask(http, **hot)
    first, second = (each["text"] for each in body["choices"])
    assert first != second
    first, second = (each["text"] for each in (await ask(http, **hot, seed=3))["choices"])
    assert first == second
    alone = await ask(http, **{**hot, "prompt": TEXT}, seed=body["seed"])
    assert alone["choices"][0]["text"] == body["choices"][0]["text"]


@pytest.mark.parametrize("prompt", [TEXT, [TEXT, "The baker"]], ids=["one", "two"])
async def test_a_stream_is_the_completion_in_pieces(http, prompt):
    whole = await ask(http, prompt=prompt, echo=True, logprobs=1)
    body = {**ASKED, "prompt": prompt, "echo": True, "logprobs": 1, "stream": True}
    body["stream_options"] = {"include_usage": True}
    *chunks, last = events(await http.post(URL, json=body))
    assert all(each["usage"] is None for each in chunks)
    for each in (*chunks, last):  # by the schema, in its order
        assert list(Completion(**each).to_dict().items()) == list(each.items())
    for choice in whole["choices"]:
        parts = [each["choices"][0] for each in chunks]
        parts = [each for each in parts if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in parts) == choice["text"]
        tokens = [token for each in parts for token in each["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


@pytest.mark.parametrize(("own", "listed"), [(42, {42, 300, 7}), (7, {300, 7})])
async def test_given_tokens_are_listed_in_place_of_the_most_likely(http, own, listed):
    """The fields of vLLM; `own` is the sampled token."""
    fields = {"logprob_token_ids": [300, 7], "allowed_token_ids": [own], "max_tokens": 1}
    fields["return_tokens_as_token_ids"] = True
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5}
    body = (await http.post("/v1/chat/completions", json={**chat, **fields})).json()
    [position] = body["choices"][0]["logprobs"]["content"]
    assert sorted(each["token"] for each in position["top_logprobs"]) == sorted(
        f"token_id:{each}" for each in listed
    )
    body = await ask(http, logprobs=5, **fields)
    [position] = body["choices"][0]["logprobs"]["top_logprobs"]
    assert set(position) == {f"token_id:{each}" for each in listed}
    for changes in ({"logprobs": None}, {"logprobs": 1, "echo": True}):
        response = await http.post(URL, json={**ASKED, **fields, **changes})
        assert response.json()["error"]["param"] == "logprob_token_ids"


async def test_an_echo_has_the_prompt_with_its_log_probabilities(http, tokenizer):
    body = await ask(http, echo=True, logprobs=2)
    plain = await ask(http, logprobs=2)
    [choice], [unechoed] = body["choices"], plain["choices"]
    assert choice["text"] == TEXT + unechoed["text"]
    logprobs, num_prompt = choice["logprobs"], len(tokenizer.encode(TEXT))
    assert "".join(logprobs["tokens"][:num_prompt]) == TEXT
    assert logprobs["tokens"][num_prompt:] == unechoed["logprobs"]["tokens"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(each < 0 for each in logprobs["token_logprobs"][1:])
    assert all(2 <= len(each) <= 3 for each in logprobs["top_logprobs"][1:])
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0
    assert [len(each) for each in logprobs["tokens"]][:-1] == [
        after - before for before, after in pairwise(offsets)
    ]


MARKS = ("<|im_start|>", "<|im_end|>")
MARKED = "<|im_start|>user\nhi<|im_end|>\nabc"


@pytest.mark.parametrize(
    ("changes", "hidden"),
    [
        ({}, ()),
        ({"skip_special_tokens": False}, ()),
        ({"truncate_prompt_tokens": 6}, MARKS),
        ({"truncate_prompt_tokens": 6, "skip_special_tokens": False}, ()),
    ],
)
async def test_offsets_of_an_echo_with_special_tokens_are_those_of_its_text(http, changes, hidden):
    asked = {"echo": True, "logprobs": 1, "allowed_token_ids": [65, 66], **changes}
    [choice] = (await ask(http, prompt=MARKED, **asked))["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    parts = [text[start:end] for start, end in pairwise([*logprobs["text_offset"], len(text)])]
    assert parts == ["" if each in hidden else each for each in logprobs["tokens"]]
    [unscored] = (await ask(http, prompt=MARKED, **{**asked, "logprobs": None}))["choices"]
    assert unscored["text"] == text


async def test_offsets_go_on_after_resumed_tokens(http):
    asked = {"logprobs": 1, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    [whole] = (await ask(http, **asked))["choices"]
    for count in range(1, 12):
        resumed = {"resume_token_ids": whole["token_ids"][:count]}
        [rest] = (await ask(http, **asked, **resumed))["choices"]
        assert rest["logprobs"]["text_offset"] == whole["logprobs"]["text_offset"][count:]


async def test_resumed_tokens_are_decoded_in_turn_and_only_for_offsets(http, router, monkeypatch):
    async def received(*_):
        raise OverloadedError("enough")

    monkeypatch.setattr(router.text, "received", received)
    resumed = {"resume_token_ids": [65, 66], "return_token_ids": True}
    await ask(http, **resumed, prompt_logprobs=1)
    response = await http.post(URL, json={**ASKED, **resumed, "logprobs": 1})
    assert response.status_code == 429


@pytest.mark.parametrize("prompt", ["e\u0301 e\u0301", "<|im_start|>e\u0301", "e\u0301<|im_end|>"])
@pytest.mark.parametrize("add_special_tokens", [True, False])
async def test_offsets_go_on_after_a_prompt_that_is_normalized(
    http, router, monkeypatch, prompt, add_special_tokens
):
    """The tokenizer joins each letter with its accent, and adds special tokens around the text."""
    [start, end] = [(each, router.text.tokenizer.token_id(each)) for each in MARKS]
    around = TemplateProcessing(f"{start[0]} $A {end[0]}", special_tokens=[start, end])
    backend = router.text.tokenizer.transformers.backend_tokenizer
    monkeypatch.setattr(backend, "normalizer", NFC())
    monkeypatch.setattr(backend, "post_processor", around)
    asked = {"echo": True, "logprobs": 1, "allowed_token_ids": [65, 66], "max_tokens": 4}
    asked["add_special_tokens"] = add_special_tokens
    [choice] = (await ask(http, prompt=prompt, **asked))["choices"]
    logprobs, size = choice["logprobs"], len(prompt)
    assert choice["text"][:size] == prompt
    assert logprobs["text_offset"][-4:] == [size, size + 1, size + 2, size + 3]
    expected = [0] * add_special_tokens + [0, len(start[0])][: 1 + prompt.startswith(start[0])]
    assert logprobs["text_offset"][: len(expected)] == expected


async def test_all_choices_echo_the_same_prompt(http):
    body = await ask(http, echo=True, logprobs=1, n=2, temperature=1, seed=5)
    first, second = (each["logprobs"] for each in body["choices"])
    num_prompt = body["usage"]["prompt_tokens"]
    assert first["token_logprobs"][:num_prompt] == second["token_logprobs"][:num_prompt]
    assert first["tokens"][num_prompt:] != second["tokens"][num_prompt:]


async def test_a_prompt_can_be_scored_without_an_answer(http):
    body = await ask(http, max_tokens=0, echo=True, logprobs=1)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logprobs": 1, "prompt": [TEXT, TEXT]}, "logprobs"),
        ({"logprobs": 1, "n": 2, "temperature": 1}, "logprobs"),
        ({"logprobs": 1, "echo": True, "max_tokens": 0, "n": 5}, "logprobs"),
        ({"logprobs": 1, "echo": True, "stream": True, "n": 5}, "logprobs"),
        ({"prompt_logprobs": 1, "prompt": [TEXT] * 4}, "prompt_logprobs"),
    ],
)
async def test_log_probabilities_of_all_prompts_choices_and_echoes_count(
    http, tokenizer, monkeypatch, changes, param
):
    num_tokens = len(tokenizer.encode(TEXT))
    assert 2 * 8 < 20 < 2 * 4 * num_tokens
    monkeypatch.setattr("cluster.api.openai.completion.MAX_ANSWER_LOGPROBS", 20)
    await ask(http, logprobs=1)
    response = await http.post(URL, json={**ASKED, **changes})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_prompt_logprobs_in_vllms_format(http):
    body = await ask(http, prompt_logprobs=2, echo=True, logprobs=1)
    [choice] = body["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert all(2 <= len(each) <= 3 for each in choice["prompt_logprobs"][1:])
    ranks = [entry["rank"] for each in choice["prompt_logprobs"][1:] for entry in each.values()]
    assert 1 in ranks


async def test_special_tokens_are_added_by_default(http):
    with_them = await ask(http)
    without = await ask(http, add_special_tokens=False)
    assert without["usage"]["prompt_tokens"] <= with_them["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [9999]}, "prompt[0]"),
        ({"prompt": [9999], "echo": True}, "prompt[0]"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [0.5, {}]}, "prompt[0]"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "receipt": True}, "receipt"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"messages": [{}]}, "messages"),
    ],
)
async def test_the_error_names_the_invalid_field(http, changes, param):
    response = await http.post(URL, json={**ASKED, **changes})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"prompt":', "body is '{\"prompt\":'; it must be JSON: Expecting value at character 10"),
        ("[1]", "body is [1]; it must be a JSON object"),
        ("", "body is None; it must be a JSON object"),
    ],
)
async def test_the_error_of_a_body_that_is_no_object_quotes_it(http, body, message):
    response = await http.post(URL, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [TEXT, [TEXT, "The baker"]], ids=["one", "two"])
async def test_grammars_are_compiled_in_the_name_of_the_client(router, monkeypatch, prompt, stream):
    callers = []

    async def compile(spec, caller, num_sequences):
        callers.append(caller)
        raise OverloadedError("enough")

    monkeypatch.setattr(router.text, "compile", compile)
    keys = ApiKeys([ApiKey("ann", "sk-correct-horse"), ApiKey("bob", "sk-battery-staple")])
    app = make_app(lambda: router, lambda: alone(router), lambda: keys)
    open_app = make_app(lambda: router, lambda: alone(router), ApiKeys)
    body = {**ASKED, "prompt": prompt, "stream": stream, "guided_regex": "a+"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        for headers, status in (
            ({"authorization": "Bearer sk-battery-staple"}, 429),
            ({}, 401),
            ({"authorization": "Bearer sk-correct-horse"}, 429),
        ):
            response = await client.post(URL, json=body, headers=headers)
            assert response.status_code == status, response.text
    for host in ("192.0.2.7", "192.0.2.8"):
        transport = httpx.ASGITransport(open_app, client=(host, 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post(URL, json=body)).status_code == 429
    strangers = [Caller(f"192.0.2.{number}", is_stranger=True) for number in (7, 8)]
    expected = [Caller("bob"), Caller("ann"), *strangers]
    assert list(dict.fromkeys(callers)) == expected, "nothing without a key where there are keys"


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("num_received", [1, 5, 11])
async def test_a_broken_stream_is_resumed_with_the_tokens_that_follow(
    http, temperature, num_received
):
    asked = {"temperature": temperature, "seed": 5, "max_tokens": 12, "return_token_ids": True}
    whole = await ask(http, **asked)
    [choice] = whole["choices"]
    received = choice["token_ids"][:num_received]
    rest = await ask(http, **asked, resume_token_ids=received)
    [other] = rest["choices"]
    assert received + other["token_ids"] == choice["token_ids"]
    assert choice["text"].endswith(other["text"])
    assert rest["usage"]["completion_tokens"] == 12
    streamed = await http.post(
        URL, json={**ASKED, **asked, "resume_token_ids": received, "stream": True}
    )
    parts = [each["choices"][0]["token_ids"] for each in events(streamed)]
    assert [token for part in parts for token in part] == other["token_ids"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": 1}, "seed"),
        ({"n": 2, "seed": 1}, "n"),
        ({"prompt": [TEXT, TEXT]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"resume_token_ids": [1] * 8}, "resume_token_ids"),
        ({"resume_token_ids": [-1]}, "resume_token_ids"),
        ({"resume_token_ids": [-1], "logprobs": 1}, "resume_token_ids"),
    ],
)
async def test_what_cannot_be_resumed_is_refused(http, changes, field):
    response = await http.post(URL, json={**ASKED, "resume_token_ids": [5], **changes})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


async def test_prompts_that_never_fit_together_are_named(http):
    """The queue takes 16 choices; a request with one for each prompt has not sent n."""
    response = await http.post(URL, json={"prompt": ["a"] * 9, "n": 2, "max_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert "9 prompts with 18 choices in all" in error["message"]
    response = await http.post(URL, json={"prompt": "a", "n": 17, "max_tokens": 1})
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("path", "prompt", "is_openai"),
    [(URL, {"prompt": [5] * 505}, True), ("/generate", {"input_ids": [5] * 505}, False)],
)
async def test_the_default_length_is_limited_to_the_context(http, path, prompt, is_openai):
    """The context has 512 tokens; a length that the client asks for is not changed."""
    sampling = {"temperature": 0, "ignore_eos": True}
    body = prompt | (sampling if is_openai else {"sampling_params": sampling})
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"] if is_openai else answer["meta_info"]
    assert usage["completion_tokens"] == 7
    limited = {"max_tokens": 8} if is_openai else {"sampling_params": {"max_new_tokens": 8}}
    error = (await http.post(path, json=body | limited)).json()["error"]
    assert error["code"] == "context_length_exceeded"
