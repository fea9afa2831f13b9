from specdec.types.messages import StepRow
from specdec.worker.batch.step_rows import positions_of_guesses, positions_to_verify


def row(num_drafts: int, num_lookahead: int) -> StepRow:
    tokens = tuple(range(4 + num_drafts + num_lookahead))
    return StepRow(1, 0, tokens, num_drafts, True, num_lookahead_tokens=num_lookahead)


def test_positions_with_lookahead() -> None:
    rows = [row(2, 0), row(2, 3), row(0, 0), row(0, 2)]
    # Of logits: 0 to 2, 3 to 8, 9, 10 to 12.
    assert positions_to_verify(rows) == [0, 1, 2, 3, 4, 5, 9, 10]
    assert positions_of_guesses(rows) == [4, 5, 6, 7, 8, 11, 12]


def test_no_positions_of_guesses_without_lookahead() -> None:
    assert positions_of_guesses([row(2, 0), row(0, 0)]) == []
