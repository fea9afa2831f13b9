"""Token usage of requests with one or several prompts."""

import pytest

from cluster.api.openai.usage import UsageMeter
from specdec.types.outputs import EngineOutput
from specdec.types.stats import SpeculationStats


def output(num_output_tokens, *, choice=0, num_cached_tokens=0, verifier="coupled"):
    stats = SpeculationStats(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=4)
    return EngineOutput(
        "r",
        (1,),
        "",
        None,
        num_prompt_tokens=5,
        num_output_tokens=num_output_tokens,
        speculation=stats,
        choice=choice,
        num_cached_tokens=num_cached_tokens,
        verifier=verifier,
    )


def test_an_output_counts_all_choices_of_its_prompt():
    meter = UsageMeter()
    assert not meter.has_output
    meter.add(0, output(1, num_cached_tokens=3))
    meter.add(0, output(2, choice=1, num_cached_tokens=5))  # computed for choice 0
    usage = meter.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 2, 7)
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_prompts_are_added_up():
    meter = UsageMeter()
    for prompt in range(3):
        meter.add(prompt, output(4, num_cached_tokens=1))
    usage = meter.usage(num_hidden_tokens=2)
    assert (usage.prompt_tokens, usage.completion_tokens) == (15, 10)
    assert usage.prompt_tokens_details.cached_tokens == 3
    speculation = usage.completion_tokens_details.speculation
    assert (speculation.num_drafts, speculation.num_accepted_tokens) == (6, 12)
    assert (speculation.acceptance_rate, speculation.mean_acceptance_length) == (0.5, 3)


@pytest.mark.parametrize(("verifier", "is_lossless"), [("block", True), ("typical", False)])
def test_a_lossy_verifier_is_reported(verifier, is_lossless):
    meter = UsageMeter()
    meter.add(0, output(1, verifier=verifier))
    speculation = meter.usage().completion_tokens_details.speculation
    assert (speculation.verifier, speculation.is_lossless) == (verifier, is_lossless)
