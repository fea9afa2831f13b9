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
def test_a_draft_is_accepted_up_to_its_first_wrong_token(best, draft, verified):
    assert verify_greedy(best, [draft]) == [verified]


def test_sequences_are_split_by_their_drafts():
    assert verify_greedy([1, 2, 3, 4, 5, 6], [(1, 9), (), (5,)]) == [(1, 2), (4,), (5, 6)]
