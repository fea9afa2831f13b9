"""Rows whose token is pending when their step is sent."""

import pytest

from specdec.types.messages import PENDING_TOKEN, RowDrafting, StepRow

PENDING = StepRow(
    3,
    10,
    (PENDING_TOKEN,),
    0,
    True,
    adapter_id=2,
    drafting=RowDrafting(by_token=((7, 8, 9), (5, 6))),
    max_end=90,
)


@pytest.mark.parametrize(("token", "drafts"), [(7, (8, 9)), (5, (6,)), (8, ())])
def test_the_pending_token_selects_its_draft(token, drafts):
    row = PENDING.resolved(10, token)
    assert row == StepRow(3, 10, (token, *drafts), len(drafts), True, adapter_id=2, max_end=90)
    assert (row.known, row.drafts, row.known_end) == ((token,), drafts, 11)


@pytest.mark.parametrize(
    ("position", "max_end", "drafts"), [(10, 13, (8, 9)), (10, 12, (8,)), (10, 10, ()), (9, 90, ())]
)
def test_a_draft_follows_all_drafts_before_it_up_to_the_end(position, max_end, drafts):
    row = PENDING._replace(max_end=max_end).resolved(position, 7)
    assert (row.num_computed_tokens, row.known, row.drafts) == (position, (7,), drafts)


def test_only_a_pending_row_is_resolved():
    assert PENDING.is_pending
    assert not PENDING.resolved(10, 7).is_pending
    assert not StepRow(3, 0, (1, 2), 0, False).is_pending


@pytest.mark.parametrize(
    ("position", "wanted"), [(20, 3), (21, 3), (22, 2), (23, 1), (24, 0), (26, 0)]
)
def test_held_drafts_end_where_the_sequence_may(position, wanted):
    """The row's own position is the highest that is possible; the drafts fit below `max_end`."""
    pending = StepRow(3, 26, (PENDING_TOKEN,), 0, True, RowDrafting(num_held=3), max_end=25)
    row = pending.resolved(position, 5, (6, 7, 8, 9))
    assert row.num_computed_tokens == position
    assert (row.known, row.drafts) == ((5,), (6, 7, 8)[:wanted])
    assert (row.num_draft_tokens, row.drafting.num_held) == (wanted, wanted)
    assert row.end <= max(25, position + 1)


def test_a_head_may_hold_less_than_is_wanted():
    pending = StepRow(3, 26, (PENDING_TOKEN,), 0, True, RowDrafting(num_held=3), max_end=90)
    row = pending.resolved(20, 5, (6,))
    assert (row.drafts, row.drafting.num_held) == ((6,), 3)


@pytest.mark.parametrize("num_lookahead", [0, 2])
@pytest.mark.parametrize(
    ("tokens", "count"), [((7,), 0), ((5, 7), 1), ((5, 6, 9), 2), ((5, 6, 8, 1), 3), ((6,), 0)]
)
def test_accepted_drafts_are_those_with_which_new_tokens_begin(num_lookahead, tokens, count):
    token_ids = (1, 2, 5, 6, 8) + (tokens[-1],) * num_lookahead
    row = StepRow(3, 4, token_ids, 3, True, num_lookahead_tokens=num_lookahead)
    assert row.num_accepted(tokens) == count
    assert list(row.accepted_drafts(tokens)) == list(range(count))


def test_accepted_drafts_of_a_tree_are_those_of_a_path():
    row = StepRow(3, 4, (1, 5, 6, 7), 3, True, RowDrafting(parents=(-1, -1, 1)))
    assert row.num_accepted((6, 7, 2)) == 2
    assert list(row.accepted_drafts((6, 7, 2))) == [1, 2]


@pytest.mark.parametrize(
    ("position", "wanted", "depth", "drafts", "parents"),
    [
        (19, 5, 3, (6, 7, 8, 9, 10), (-1, -1, 0, 0, 2)),
        (20, 5, 3, (6, 7, 8, 9), (-1, -1, 0, 0)),
        (19, 5, 2, (6, 7, 8, 9), (-1, -1, 0, 0)),
        (19, 2, 1, (6, 7), (-1, -1)),
        (21, 5, 3, (6, 8, 10), None),
        (22, 5, 3, (6, 8), None),
        (20, 5, 0, (6, 8, 10), None),
        (24, 5, 3, (), None),
    ],
)
def test_of_a_held_tree_the_first_nodes_are_taken_or_its_first_path(
    position, wanted, depth, drafts, parents
):
    """As the drafts of a step that is not begun ahead: within `depth` and below `max_end`."""
    pending = StepRow(
        3,
        26,
        (PENDING_TOKEN,),
        0,
        True,
        drafting=RowDrafting(num_held=wanted, held_depth=depth),
        max_end=25,
    )
    row = pending.resolved(position, 5, (6, 7, 8, 9, 10), (-1, -1, 0, 0, 2))
    assert (row.drafts, row.drafting.parents) == (drafts, parents)
    assert row.drafting.num_held == min(wanted, 25 - position - 1)
