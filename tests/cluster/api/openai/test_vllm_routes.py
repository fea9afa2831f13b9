"""Fields and paths beside OpenAI's that clients of vLLM and SGLang expect."""

import copy
from importlib.metadata import version

import pytest

from cluster.api.openai.builders import matched_stop
from specdec.types.responses import FinishReason
from tests.cluster.api.openai.test_builders import output

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "Ask the baker"}], "max_tokens": 8}


async def test_the_version_and_the_load(http):
    assert (await http.get("/version")).json() == {"version": version("specdec")}
    assert (await http.get("/load")).json() == {"server_load": 0}


async def test_the_tokenizer_is_described_where_that_is_enabled(http, router, monkeypatch):
    refused = await http.get("/tokenizer_info")
    assert refused.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in refused.json()["error"]["message"]
    config = copy.copy(router.config)
    object.__setattr__(config, "enable_tokenizer_info_endpoint", True)
    monkeypatch.setattr(router, "config", config)
    info = (await http.get("/tokenizer_info")).json()
    assert info["chat_template"] == router.text.chat_template.text
    assert info["eos_token"] == "<|im_end|>"
    assert info["tokenizer_class"].startswith("PreTrained") or info["tokenizer_class"]
    assert router.config.model not in str(info)


async def test_a_model_has_a_root_without_a_path(http):
    [card] = (await http.get("/v1/models")).json()["data"]
    assert card["root"] == card["id"] == "tiny"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_default_is_the_served_model(http, path):
    body = {"prompt": "The river"} if path == "/v1/completions" else CHAT
    response = await http.post(path, json={**body, "model": "default", "max_tokens": 1})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("form", "text"), [({"regex": "ab{3}"}, "abbb"), ({"ebnf": 'root ::= "abc"'}, "abc")]
)
async def test_sglangs_formats_of_a_text(http, form, text):
    body = (await http.post("/v1/chat/completions", json={**CHAT, **form})).json()
    assert body["choices"][0]["message"]["content"] == text
    body = (await http.post("/v1/completions", json={"prompt": "The river", **form})).json()
    assert body["choices"][0]["text"] == text


async def test_sglangs_schema_of_a_completion(http):
    asked = {"prompt": "The river", "json_schema": '{"const": 7}'}
    assert (await http.post("/v1/completions", json=asked)).json()["choices"][0]["text"] == "7"


async def test_an_invalid_format_is_named_as_the_client_named_it(http):
    response = await http.post("/v1/chat/completions", json={**CHAT, "regex": "("})
    assert response.json()["error"]["param"] == "regex"


@pytest.mark.parametrize(
    ("changes", "matched"),
    [
        ({"finish_reason": FinishReason.LENGTH, "stop_reason": None}, None),
        ({"finish_reason": FinishReason.STOP, "stop_reason": "end"}, "end"),
        ({"finish_reason": FinishReason.STOP, "stop_reason": None, "token_ids": (5, 2)}, 2),
    ],
)
async def test_what_ended_a_text(changes, matched):
    assert matched_stop(output(2)._replace(**changes)) == matched


async def test_the_last_event_has_what_ended_the_text(http):
    body = {**CHAT, "stop": ["a", "e"], "max_tokens": 60, "temperature": 0}
    choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["matched_stop"] == choice["stop_reason"]
    streamed = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text
    assert streamed.count('"matched_stop"') == 1
