import pytest

from specdec.sampling.verifiers import verify_greedy


@pytest.mark.parametrize(
    ("best", "draft", "verified"),
    [
        ([7], (), (7,)),
        ([7, 8, 9], (7, 8), (7, 8, 9)),
        ([7, 8, 9], (7, 5), (7, 8)),
        ([7, 8, 9], (5, 8), (7,)),
    ],
)
def test_a_draft_counts_up_to_its_first_token_that_is_not_the_best(best, draft, verified):
    assert verify_greedy(best, [draft]) == [verified]


def test_every_sequence_has_its_own_part_of_the_tokens():
    assert verify_greedy([1, 2, 3, 4, 5, 6], [(1, 9), (), (5,)]) == [(1, 2), (4,), (5, 6)]
