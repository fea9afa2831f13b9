import pytest

from specdec.sampling.verifiers import verify_equal


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
    assert verify_equal(best, [(draft, None, -1)]) == [verified]


def test_sequences_are_split_by_their_drafts():
    drafts = [(draft, None, -1) for draft in [(1, 9), (), (5,)]]
    assert verify_equal([1, 2, 3, 4, 5, 6], drafts) == [(1, 2), (4,), (5, 6)]


def test_a_number_to_keep_takes_the_place_of_equality():
    assert verify_equal([1, 2, 3], [((8, 9), None, 0)]) == [(1,)]
    assert verify_equal([1, 2, 3], [((8, 9), None, 1)]) == [(8, 2)]
    assert verify_equal([1, 2, 3], [((8, 9), None, 2)]) == [(8, 9, 3)]
