"""What is built on a thread and what at once."""

import threading
from types import SimpleNamespace

import pytest

from cluster.api.openai.offload import MANY_TOKENS, off_loop, tells_many


@pytest.mark.parametrize("is_large", [False, True])
async def test_only_what_is_large_is_built_on_a_thread(is_large):
    thread = await off_loop(threading.get_ident, is_large=is_large)
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
def test_many_are_those_of_a_prompt_or_of_many_tokens(num_tokens, prompt, names, many):
    output = SimpleNamespace(token_ids=(1,) * num_tokens, prompt_logprobs=prompt)
    assert tells_many(output, names) == many
