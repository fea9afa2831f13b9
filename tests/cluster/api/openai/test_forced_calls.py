"""Forced calls over HTTP: answers that end at a repeated call."""

import pytest

from specdec.engine.metrics.metrics import GENERATION_TOKENS
from tests.cluster.api.openai.conftest import events
from tests.cluster.api.openai.test_chat import CHAT, URL

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE_CALL = {"type": "object", "properties": {"who": {"const": "baker"}}, "required": ["who"],
            "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_required_calls_end_before_one_that_repeats_another(http, router, tokenizer, stream):
    """The grammar allows 128 calls, and the only possible one is repeated.

    For the metrics such a request has ended as for its client.
    """
    before = router.report().counts
    tools = [{"type": "function", "function": {"name": "ask", "parameters": ONE_CALL}}]
    no_end = {"logit_bias": {str(tokenizer.end_token_id): -100}}
    body = {**CHAT, **no_end, "tools": tools, "tool_choice": "required", "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await http.post(URL, json={**body, **options, "max_tokens": 160})
    assert response.status_code == 200, response.text
    counts = router.report().counts.minus(before)
    assert {name: count for name, count in counts.ended.items() if count} == {"stop": 1}
    num_tokens = counts.histograms[GENERATION_TOKENS].total
    if stream:
        *chunks, last = events(response)
        deltas, usage = [each["choices"][0] for each in chunks], last["usage"]
        assert deltas[-1]["matched_stop"] is None
        calls = [call for each in deltas for call in each["delta"].get("tool_calls", [])]
        assert {call["index"] for call in calls} == {0}
        reason = deltas[-1]["finish_reason"]
    else:
        [answer] = response.json()["choices"]
        assert len(answer["message"]["tool_calls"]) == 1
        usage = response.json()["usage"]
        assert answer["matched_stop"] is None
        reason = answer["finish_reason"]
    assert reason == "tool_calls"
    assert usage["completion_tokens"] == num_tokens < 150
