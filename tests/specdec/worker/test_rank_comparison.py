"""Comparison of what the ranks of a group have computed, for debugging."""

import pytest

from specdec.types.draft_messages import (
    AheadDraft,
    AheadOutput,
    AheadRow,
    Continuation,
    DraftedRow,
    DraftOutput,
    DraftRow,
    DraftStep,
)
from specdec.types.messages import PENDING_TOKEN, StepInput, StepRow, VerifiedRow, VerifyOutput
from specdec.worker import RankComparison, RankMismatchError
from tests.specdec.fakes import run_ranks

DRAFTED = StepRow(7, 10, (3, 4, 5), 2, samples=True)  # two drafts after position 10
PENDING = StepRow(7, 99, (PENDING_TOKEN,), 0, samples=True)  # which is not the position


def compared(*of_ranks):
    """Run a function with a comparison on each rank; return the errors, and the last calls."""

    def on_rank(group):
        try:
            of_ranks[group.rank](RankComparison.of(group, is_wanted=True))
        except RankMismatchError as error:
            return str(error), group.called
        return None, group.called

    return run_ranks(len(of_ranks), on_rank)


def steps(*outputs):
    """Return a function that compares the outputs of steps, the first with drafts."""

    def check(comparison):
        for index in range(len(outputs)):  # the next one begins before the first has ended
            comparison.note(StepInput(index, (), (), (), (PENDING if index else DRAFTED,)))
        for index, output in enumerate(outputs):
            comparison.check(VerifyOutput(index, (output,)))

    return check


def test_equal_tokens_cost_one_exchange_a_step():
    verified = VerifiedRow(7, (4, 5, 6), next_draft_token_ids=(1, 2))
    assert compared(*[steps(verified, verified)] * 3) == [(None, ["all_gather"] * 2)] * 3


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            VerifiedRow(7, (4, 6)),
            VerifiedRow(7, (4, 8)),
            "rank 1 has computed token 8 at position 12 of sequence 7, and rank 0 token 6 at "
            "position 12 of sequence 7",
        ),
        (
            VerifiedRow(7, (4,)),
            VerifiedRow(7, (4, 5)),
            "rank 1 has computed token 5 at position 12 of sequence 7, and rank 0 no further token",
        ),
        (
            VerifiedRow(7, (4,), next_draft_token_ids=(1, 2)),
            VerifiedRow(7, (4,), next_draft_token_ids=(1, 3)),
            "rank 1 has computed draft token 3 at position 13 of sequence 7, and rank 0 draft "
            "token 2 at position 13 of sequence 7",
        ),
    ],
)
def test_the_first_difference_is_named_on_all_ranks(first, second, message):
    found = compared(steps(first), steps(second))
    assert found == [(message, ["all_gather"] * 2)] * 2


def test_positions_of_pending_tokens_follow_from_the_steps_before():
    first = VerifiedRow(7, (4, 5, 6))  # at positions 11 to 13
    [(message, _), _] = compared(
        steps(first, VerifiedRow(7, (8,))), steps(first, VerifiedRow(7, (9,)))
    )
    assert "token 9 at position 14 of sequence 7" in message


def test_sequences_that_are_released_are_forgotten():
    def check(comparison):
        steps(VerifiedRow(7, (4,)))(comparison)
        comparison.note(StepInput(1, (7,), (), (), ()))
        comparison.check(VerifyOutput(1, ()))
        assert not comparison._ends

    assert [error for error, _ in compared(check, check)] == [None] * 2


@pytest.mark.parametrize("own", [4, 5])
def test_drafts_of_a_draft_model_are_compared(own):
    row, ahead = DraftRow(7, 10, (3,), 2, 11), AheadRow(7, 10, (3, 4), 1, (1, 1), 2, 11)
    step = DraftStep(0, (), (), (), (), (row,), (ahead,))

    def of(token):
        def drafts(comparison):
            comparison.check_drafts(step, DraftOutput(0, (DraftedRow(7, (3, token)),)))

        def drafts_ahead(comparison):
            found = (Continuation(0, 6, (3,)), Continuation(1, 6, (token,)))
            comparison.check_ahead(step, AheadOutput(0, (AheadDraft(7, found),)))

        return drafts, drafts_ahead

    for at, first, second in zip((12, 13), of(4), of(own), strict=True):
        [(message, _), _] = compared(first, second)
        if own == 4:
            assert message is None
        else:
            assert f"rank 1 has computed draft token 5 at position {at} of sequence 7" in message


def test_nothing_is_compared_unless_it_is_wanted_and_there_are_several_ranks():
    assert run_ranks(2, lambda group: RankComparison.of(group, is_wanted=False)) == [None] * 2
    assert run_ranks(1, lambda group: RankComparison.of(group, is_wanted=True)) == [None]
