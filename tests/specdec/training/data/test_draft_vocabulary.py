"""The reduced vocabulary: which tokens are chosen, its maps, and its coverage."""

import numpy as np
import pytest

from specdec.training.data.corpus import Sample
from specdec.training.data.draft_vocabulary import ReducedVocabulary, token_counts
from specdec.types.errors import InvalidValueError

SAMPLES = [Sample((9, 9, 9, 3, 3, 5), 3, 0.0), Sample((1, 3, 5, 7), 1, 0.7)]
COUNTS = token_counts(SAMPLES, 10)


def test_only_answers_are_counted():
    assert COUNTS.tolist() == [0, 0, 0, 3, 0, 2, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("size", "always", "chosen"),
    [
        (1, (), [3]),
        (2, (), [3, 5]),
        (2, (8,), [3, 8]),  # a special token displaces a frequent one
        (3, (3, 8), [3, 5, 8]),  # a frequent special token counts once
        (5, (), [0, 1, 3, 5, 7]),  # the lowest ids fill up
        (10, (8,), list(range(10))),
    ],
)
def test_the_most_frequent_tokens_are_chosen(size, always, chosen):
    assert ReducedVocabulary.of_counts(COUNTS, size, always).token_ids.tolist() == chosen


def test_equal_counts_are_ordered_by_id():
    counts = np.array([1, 2, 2, 2], np.int64)
    assert ReducedVocabulary.of_counts(counts, 2, ()).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("own", "always", "renewed"),
    [
        ([0, 1, 2, 4], (), [0, 3, 5, 7]),  # the highest ids that are not counted leave
        ([0, 1, 8, 9], (8, 9), [3, 5, 8, 9]),  # special tokens are often the highest ids
        ([0, 1, 2, 4], (8, 9), [0, 3, 5, 7]),  # those that the head lacks are not added
        ([3, 5, 7, 9], (), [3, 5, 7, 9]),  # no token is missing
        ([8, 9], (), [3, 5]),  # more are counted than fit
        ([7, 9], (9,), [3, 9]),  # the least counted leaves
    ],
)
def test_counted_tokens_replace_those_that_count_least(own, always, renewed):
    vocabulary = ReducedVocabulary(np.array(own)).renewed(COUNTS, always)
    assert vocabulary.token_ids.tolist() == renewed


def test_coverage_is_the_share_of_tokens_that_can_be_drafted():
    vocabulary = ReducedVocabulary.of_counts(COUNTS, 2, ())
    assert vocabulary.coverage(COUNTS) == 5 / 6
    assert vocabulary.coverage(np.zeros(10, np.int64)) == 1


@pytest.mark.parametrize("size", [0, 1, 11])
def test_a_size_that_is_not_possible_is_refused(size):
    with pytest.raises(InvalidValueError, match="from 2, the special tokens, to 10"):
        ReducedVocabulary.of_counts(COUNTS, size, (8, 9))
