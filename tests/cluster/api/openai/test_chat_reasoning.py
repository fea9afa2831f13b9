"""Reasoning of chats: its place in responses, its tokens, and budgets that end it."""

import json
from dataclasses import replace

import pytest

from cluster.api.openai.parsers.reasoning import SYNTAXES, ReasoningSyntax
from specdec.engine.metrics.metrics import (
    END_TO_END,
    FIRST_TOKEN,
    GENERATION_TOKENS,
    PROMPT_TOKENS,
    QUEUE_TIME,
)
from specdec.text.tokenizer import Tokenizer
from tests.cluster.api.openai.conftest import events
from tests.cluster.api.openai.test_chat import CHAT, MORE, URL, ask, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_reasoning_is_a_separate_field(http, router, monkeypatch):
    plain = (await ask(http, max_tokens=20))["choices"][0]["message"]["content"]
    config = replace(router.config, reasoning_parser="deepseek_r1")
    monkeypatch.setattr(router, "config", config)
    message = (await ask(http, max_tokens=20))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (plain.strip(), "")
    assert message["reasoning"] == message["reasoning_content"]
    hidden = (await ask(http, max_tokens=20, include_reasoning=False))["choices"][0]["message"]
    assert not {"reasoning", "reasoning_content"} & hidden.keys()
    response = await http.post(URL, json={**CHAT, **MORE, "max_tokens": 20, "stream": True})
    deltas = [each["choices"][0]["delta"] for each in events(response)]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(each.get(name, "") for each in deltas) == plain.strip()
    assert not any(each.get("content") for each in deltas)


def message_text(response):
    messages = [each for each in response["output"] if each["type"] == "message"]
    return "".join(part["text"] for each in messages for part in each["content"])


@pytest.mark.parametrize("asked", [{"summary": "auto"}, {"generate_summary": "detailed"}])
async def test_the_reasoning_of_a_response_is_an_item(http, router, monkeypatch, asked):
    config = replace(router.config, reasoning_parser="deepseek_r1")
    monkeypatch.setattr(router, "config", config)
    body = {"input": "Ask the baker", "max_output_tokens": 16, "temperature": 0}
    response = (await http.post("/v1/responses", json=body)).json()
    [item] = response["output"]
    assert (item["type"], item["status"], item["summary"]) == ("reasoning", "incomplete", [])
    assert item["content"][0]["text"]
    summarized = (await http.post("/v1/responses", json={**body, "reasoning": asked})).json()
    [shown] = summarized["output"]
    assert shown["content"] == item["content"]
    assert shown["summary"] == [{"type": "summary_text", "text": item["content"][0]["text"]}]
    details = response["usage"]["output_tokens_details"]
    assert details["reasoning_tokens"] == response["usage"]["output_tokens"] > 0


async def test_log_probabilities_are_those_of_the_message(http, router, monkeypatch):
    async def last_item(**changes):
        body = {"input": "Ask the baker", "max_output_tokens": 16, "seed": 1, "temperature": 1}
        body["include"] = ["message.output_text.logprobs"]
        [*_, item] = (await http.post("/v1/responses", json={**body, **changes})).json()["output"]
        return [each["token"] for each in item["content"][0]["logprobs"]]

    tokens = await last_item()
    closing = "".join(tokens[4:7])  # ends what stands for the reasoning
    syntax = ReasoningSyntax(("<think>",), (closing,), begins_inside=True)
    monkeypatch.setitem(SYNTAXES, "qwen3", syntax)
    monkeypatch.setattr(router, "config", replace(router.config, reasoning_parser="qwen3"))
    assert await last_item() == tokens[7:]


@pytest.mark.parametrize("limits", [{}, {"stop": ["never", "ever"]}])
async def test_a_broken_stream_is_resumed_within_its_reasoning(http, router, monkeypatch, limits):
    """Wherever it breaks, also within the mark: the rest follows, whole and streamed."""
    letters = router.text.tokenizer.encode("q w e r t y u i o p", add_special_tokens=False)
    asked = {"max_tokens": 12, "seed": 5, "temperature": 1, "return_token_ids": True, **limits}
    asked["allowed_token_ids"] = sorted(set(letters))
    token_ids = (await ask(http, **asked))["choices"][0]["token_ids"]
    closing = router.text.tokenizer.decode(token_ids[4:7])
    syntax = ReasoningSyntax(("<think>",), (closing,), begins_inside=True)
    monkeypatch.setitem(SYNTAXES, "qwen3", syntax)
    monkeypatch.setattr(router, "config", replace(router.config, reasoning_parser="qwen3"))

    async def resumed(received, **changes):
        body = {**CHAT, **MORE, **asked, **changes, "resume_token_ids": received}
        return await http.post(URL, json=body)

    async def streamed(received):
        response = await resumed(received, stream=True, stream_options={"include_usage": True})
        *chunks, last = events(response)
        details = last["usage"]["completion_tokens_details"]
        return [each["choices"][0] for each in chunks], details["reasoning_tokens"]

    def texts(parts):
        names = ("reasoning", "content")
        return ["".join(each.get(name) or "" for each in parts) for name in names]

    chunks, num_reasoning_tokens = await streamed([])
    whole = texts([each["delta"] for each in chunks])
    assert all(whole)
    for num_chunks in range(1, len(chunks)):
        received = [token for each in chunks[:num_chunks] for token in each.get("token_ids", ())]
        rest, num_resumed = await streamed(received)
        assert num_resumed == num_reasoning_tokens
        deltas = [each["delta"] for each in rest]
        assert texts([each["delta"] for each in chunks[:num_chunks]] + deltas) == whole
        message = (await resumed(received)).json()["choices"][0]["message"]
        assert texts([message]) == texts(deltas)


async def test_an_answer_that_is_not_parsed_is_resumed_without_its_text(http, router, monkeypatch):
    monkeypatch.setattr(router.text, "received", None)
    answer = await ask(http, resume_token_ids=[65, 66], max_tokens=4, temperature=0)
    assert answer["usage"]["completion_tokens"] == 4


async def test_what_depends_on_the_beginning_is_not_resumed(http, router, monkeypatch):
    resumed = {"resume_token_ids": [5], "thinking_token_budget": 4}
    monkeypatch.setattr(router, "config", replace(router.config, reasoning_parser="deepseek_r1"))
    assert "left out where resume_token_ids is given" in (await refusal(http, **resumed))["message"]


HYBRID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
    "{% endif %}"
)


@pytest.fixture(params=["deepseek_r1", "qwen3"])
def parser(request, router, tiny_model_dir, monkeypatch):
    """Give the service a template that opens or closes the reasoning in the prompt."""
    template = Tokenizer(tiny_model_dir, HYBRID).chat_template
    monkeypatch.setattr(router.text.tokenizer, "chat_template", template)
    config = replace(router.config, reasoning_parser=request.param)
    monkeypatch.setattr(router, "config", config)


def text_of(deltas, name):
    return "".join(each.get(name) or "" for each in deltas)


@pytest.mark.parametrize("is_on", [True, False])
async def test_the_rendered_prompt_opens_or_closes_the_reasoning(http, parser, is_on):
    changes = {"max_tokens": 20, "chat_template_kwargs": {"enable_thinking": is_on}}
    body = await ask(http, **changes, n=2, temperature=1, seed=1)
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == (body["usage"]["completion_tokens"] if is_on else 0)
    for choice in body["choices"]:
        message = choice["message"]
        assert bool(message["content"]) != is_on
        assert bool(message.get("reasoning_content")) == is_on
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await http.post(URL, json={**CHAT, **MORE, **changes, **options})
    *chunks, last = events(response)
    deltas = [each["choices"][0]["delta"] for each in chunks]
    assert bool(text_of(deltas, "content")) != is_on
    assert bool(text_of(deltas, "reasoning_content")) == is_on
    counted = last["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == (20 if is_on else 0)


async def test_a_format_follows_only_reasoning_that_the_prompt_opens(http, parser):
    """With a budget, since the random model writes no mark."""
    for is_on in (True, False):
        changes = {"guided_choice": ["yes", "no"], "thinking_token_budget": 5, "max_tokens": 60}
        changes |= {"chat_template_kwargs": {"enable_thinking": is_on}}
        message = (await ask(http, **changes))["choices"][0]["message"]
        assert message["content"] in ("yes", "no")
        assert ("reasoning_content" in message) == is_on


async def test_reasoning_that_is_closed_in_the_prompt_has_no_budget(http, parser):
    changes = {"max_tokens": 30, "chat_template_kwargs": {"enable_thinking": False}}
    plain = await ask(http, **changes)
    assert (await ask(http, **changes, thinking_token_budget=5))["choices"] == plain["choices"]
    opened = await ask(http, max_tokens=90, thinking_token_budget=5)
    assert opened["choices"][0]["message"]["content"]
    counted = opened["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 5 < counted < 90


@pytest.mark.parametrize(
    ("beginning", "is_reasoning"),
    [("The baker", False), ("<think>\nI think", True), ("<think>\na</think>\nSo", False)],
)
async def test_an_answer_continues_a_message_in_its_state(http, parser, beginning, is_reasoning):
    messages = [*CHAT["messages"], {"role": "assistant", "content": beginning}]
    body = await ask(http, messages=messages, continue_final_message=True)
    message = body["choices"][0]["message"]
    assert bool(message["content"]) != is_reasoning
    assert bool(message.get("reasoning_content")) == is_reasoning
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert bool(counted) == is_reasoning


@pytest.mark.parametrize("kind", ["enabled", "disabled"])
async def test_messages_have_a_block_as_the_prompt_begins_it(http, parser, kind):
    body = {**CHAT, "max_tokens": 20, "thinking": {"type": kind}}
    response = await http.post("/v1/messages", json=body)
    expected = {"enabled": ["thinking"], "disabled": ["text"]}[kind]
    assert [each["type"] for each in response.json()["content"]] == expected


async def test_a_response_has_the_answer_after_reasoning_that_the_prompt_closes(
    http, router, parser, tiny_model_dir, monkeypatch
):
    body = {"input": "Ask the baker", "max_output_tokens": 16, "temperature": 0}
    opened = (await http.post("/v1/responses", json=body)).json()
    assert message_text(opened) == ""
    closing = Tokenizer(tiny_model_dir, HYBRID.replace("enable_thinking is defined and not", "not"))
    monkeypatch.setattr(router.text.tokenizer, "chat_template", closing.chat_template)
    closed = (await http.post("/v1/responses", json=body)).json()
    assert message_text(closed)
    assert closed["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


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


async def test_a_request_with_a_thinking_budget_counts_once(http, router, monkeypatch):
    """By rates and latencies, rules, objectives and autoscaling decide."""
    config = replace(router.config, reasoning_parser="deepseek_r1")
    monkeypatch.setattr(router, "config", config)
    thread = router.running_engine().thread
    before, num_before = router.metrics.counts, (await thread.stats()).counts.num_requests
    usage = (await ask(http, max_tokens=40, thinking_token_budget=12))["usage"]
    counts, num_requests = router.metrics.counts, (await thread.stats()).counts.num_requests
    assert num_requests == num_before + 1
    names = (FIRST_TOKEN, QUEUE_TIME, END_TO_END, PROMPT_TOKENS, GENERATION_TOKENS)
    found = {name: (counts.histograms[name], before.histograms[name]) for name in names}
    assert {sum(now.counts) - sum(then.counts) for now, then in found.values()} == {1}
    totals = {name: now.total - then.total for name, (now, then) in found.items()}
    assert totals[PROMPT_TOKENS] == usage["prompt_tokens"]
    assert totals[GENERATION_TOKENS] == usage["completion_tokens"] == 40


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


@pytest.mark.parametrize("parser", ["none", "gpt_oss"])
async def test_a_budget_is_ignored_where_a_grammar_leaves_no_place(
    http, router, monkeypatch, parser
):
    monkeypatch.setattr(router, "config", replace(router.config, reasoning_parser=parser))
    forced = {"tools": [{"type": "function", "function": {"name": "ask"}}], "max_tokens": 4}
    for choice in ("required", {"type": "function", "function": {"name": "ask"}}):
        plain = await ask(http, **forced, tool_choice=choice)
        body = await ask(http, **forced, tool_choice=choice, thinking_token_budget=2)
        assert body["choices"] == plain["choices"]
        body = {**CHAT, **forced, "tool_choice": choice, "thinking_token_budget": 2}
        [warning] = json.loads((await http.post(URL, json=body)).headers["x-specdec-warnings"])
        assert warning.startswith("thinking_token_budget: ignored")


async def test_a_budget_needs_a_parser_of_reasoning(http, router, monkeypatch):
    error = await refusal(http, thinking_token_budget=9)
    assert "unless the service has a reasoning parser" in error["message"]
    config = replace(router.config, reasoning_parser="qwen3")
    monkeypatch.setattr(router, "config", config)
    assert "where n is given" in (await refusal(http, thinking_token_budget=9, n=2))["message"]
    error = await refusal(http, thinking_token_budget=0)
    assert error["param"] == "thinking_token_budget"
