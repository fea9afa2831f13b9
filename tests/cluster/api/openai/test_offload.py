"""Large responses are built on a thread, others on the event loop."""

import threading
from types import SimpleNamespace

import pytest

from cluster.api.openai.offload import MANY_TOKENS, has_many_logprobs, offload


@pytest.mark.parametrize("is_large", [False, True])
async def test_only_large_work_runs_on_a_thread(is_large):
    thread = await offload(threading.get_ident, is_large=is_large)
    assert (thread != threading.get_ident()) == is_large


@pytest.mark.parametrize(
    ("num_tokens", "prompt", "names", "many"),
    [
        (MANY_TOKENS + 1, None, "names", True),
        (MANY_TOKENS, None, "names", False),
        (1, "some", "names", True),
        (MANY_TOKENS + 1, "some", None, False),
    ],
)
def test_logprobs_of_a_prompt_or_of_many_tokens_are_large(num_tokens, prompt, names, many):
    output = SimpleNamespace(token_ids=(1,) * num_tokens, prompt_logprobs=prompt)
    assert has_many_logprobs(output, names) == many
