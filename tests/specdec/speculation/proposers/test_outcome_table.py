"""Tests of the use of drafts that were made ahead."""

import numpy as np
import pytest

from specdec.speculation.proposers.outcome_table import (
    AheadRound,
    AheadTokens,
    Outcome,
    OutcomeTable,
)
from specdec.types.messages import DraftProbs

TEXT = [1, 2, 3]
ROUND = AheadRound(3, (10, 11, 12))


def table(**probs):
    return OutcomeTable.of(
        ROUND,
        [
            (Outcome(0, 20), AheadTokens((21, 22, 23), **probs)),
            (Outcome(0, 30), AheadTokens((31,))),
            (Outcome(2, 20), AheadTokens((41, 42))),
            (Outcome(3, 13), AheadTokens((14, 15, 16))),
            (Outcome(0, 20), AheadTokens((99,))),
        ],
    )


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ([20], (21, 22, 23)),
        ([30], (31,)),
        ([40], None),
        ([10, 11, 20], (41, 42)),
        ([10, 20], None),
        ([10, 11, 12, 13], (14, 15, 16)),
        ([10, 11, 12, 14], None),
        ([], None),
    ],
)
def test_the_outcome_selects_the_draft(new, expected):
    found = table().continuing([*TEXT, *new])
    assert (None if found is None else found.token_ids) == expected


@pytest.mark.parametrize(
    ("new", "expected"),
    [([20, 21], (22, 23)), ([20, 21, 22], (23,)), ([20, 21, 22, 23], None), ([20, 22], None)],
)
def test_a_late_draft_keeps_what_is_still_ahead(new, expected):
    """The row went without a draft, and the target has added the tokens that it predicted."""
    found = table().continuing([*TEXT, *new])
    assert (None if found is None else found.token_ids) == expected


def test_a_sampled_draft_is_used_in_the_round_after_its_outcome_alone():
    """Its noise is keyed by the place in that round."""
    probs = DraftProbs(np.full((3, 1), 21, np.int32), np.ones((3, 1), np.float32))
    sampled = table(draft_probs=probs)
    assert sampled.continuing([*TEXT, 20]).draft_probs is probs
    assert sampled.continuing([*TEXT, 20, 21]) is None


def test_ranks_are_those_among_the_same_number_of_accepted_drafts():
    assert table().rank(Outcome(0, 30)) == 1
    assert table().rank(Outcome(2, 20)) == 0
    assert table().rank(Outcome(1, 20)) is None
    assert [table().num_tried(count) for count in range(4)] == [2, 0, 1, 1]
