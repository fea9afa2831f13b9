"""Reasoning of chats: a separate field, and budgets that end it."""

from dataclasses import replace

import pytest

from tests.cluster.api.openai.conftest import events
from tests.cluster.api.openai.test_chat import CHAT, MORE, URL, ask, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
