from specdec.speculation.proposers.base import IngestBudget
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS


def test_long_texts_share_the_budget_and_one_step_is_always_granted() -> None:
    budget, most_of_a_step = IngestBudget(1000), MAX_NUM_SPECULATIVE_TOKENS + 1
    assert [budget.grant(number) for number in (600, 5, 600, 600)] == [600, 5, 395, most_of_a_step]
    assert budget.grant(most_of_a_step) == most_of_a_step
    assert budget.grant(0) == 0
