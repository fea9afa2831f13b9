"""Rows whose token is pending when their step is sent."""

import pytest

from specdec.types.messages import PENDING_TOKEN, StepRow

PENDING = StepRow(
    3, 10, (PENDING_TOKEN,), 0, True, adapter_id=2, drafts_by_token=((7, 8, 9), (5, 6))
)


@pytest.mark.parametrize(("token", "drafts"), [(7, (8, 9)), (5, (6,)), (8, ())])
def test_the_pending_token_selects_its_draft(token, drafts):
    row = PENDING.resolved(token)
    assert row == StepRow(3, 10, (token, *drafts), len(drafts), True, adapter_id=2)
    assert (row.known, row.drafts, row.known_end) == ((token,), drafts, 11)


def test_only_a_pending_row_is_resolved():
    assert PENDING.is_pending
    assert not PENDING.resolved(7).is_pending
    assert not StepRow(3, 0, (1, 2), 0, False).is_pending
