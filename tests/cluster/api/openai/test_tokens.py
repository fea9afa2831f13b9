"""Tokens and models over HTTP."""

import pytest

from cluster.replica.lifecycle import Loading
from cluster.replica.preprocessor import EncodeLimiter, Preprocessor
from specdec.types.errors import OverloadedError

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The river begins"


async def test_tokenize_and_detokenize_round_trip(http, tokenizer):
    answer = (await http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})).json()
    ids = tokenizer.encode(TEXT)
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert answer["token_strs"] == tokenizer.token_strings(ids)
    assert answer["max_model_len"] == 512
    back = await http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": TEXT}


async def test_a_chat_is_tokenized_like_a_prompt(http):
    chat = {"messages": [{"role": "user", "content": "Ask the baker"}]}
    tool = {"type": "function", "function": {"name": "ask"}}
    for options in ({}, {"tools": [tool]}, {"add_generation_prompt": False}):
        counted = (await http.post("/tokenize", json={**chat, **options})).json()
        asked = {**chat, **options, "max_tokens": 1}
        body = (await http.post("/v1/chat/completions", json=asked)).json()
        assert counted["count"] == body["usage"]["prompt_tokens"]
        assert counted["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_requests_are_rejected_while_the_model_loads(http, router, monkeypatch, path, body):
    monkeypatch.setattr(router, "_state", Loading("r", router.setup.settings))
    # The property would read it on the event loop.
    monkeypatch.delattr(Preprocessor, "tokenizer")
    assert (await http.post(path, json=body)).status_code == 503


async def test_prompts_beyond_the_encode_limit_are_rejected(http, monkeypatch):
    async def full(room, work, num_chars):
        raise OverloadedError("8000000 characters of prompts wait to be encoded")

    monkeypatch.setattr(EncodeLimiter, "run", full)
    response = await http.post("/tokenize", json={"prompt": TEXT})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, None),
        ("/detokenize", {"tokens": [9999]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "gpt-9"}, 404, None),
    ],
)
async def test_the_error_names_the_invalid_field(http, path, body, status, param):
    response = await http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_the_model_is_listed_and_described(http):
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
    assert (await http.get("/v1/models/tiny")).json() == card
    missing = await http.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
