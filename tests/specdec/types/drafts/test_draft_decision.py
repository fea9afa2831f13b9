"""Tests of decisions counted by reason, and of the timeline of changes."""

import pytest

from specdec.types.drafts.draft_decision import (
    MAX_KEPT_CHANGES,
    DecisionChange,
    DecisionLog,
    DecisionReason,
    trees,
)
from tests.clock import Clock


def test_every_step_is_counted_but_only_changes_are_kept():
    clock = Clock(5.0)
    log = DecisionLog(clock)
    for count, reason, load in (
        (3, DecisionReason.GOODPUT, 1),
        (3, DecisionReason.GOODPUT, 2),
        (0, DecisionReason.THRESHOLD, 9),
        (0, DecisionReason.OPERATOR, 9),
    ):
        log.record(count, reason, load)
        clock.now_s += 1
    assert log.counts == {
        DecisionReason.GOODPUT: 2,
        DecisionReason.THRESHOLD: 1,
        DecisionReason.OPERATOR: 1,
    }
    assert log.lengths == (2, 0, 0, 2)
    assert log.changes == (
        DecisionChange(5.0, 3, DecisionReason.GOODPUT, 1),
        DecisionChange(7.0, 0, DecisionReason.THRESHOLD, 9),
        DecisionChange(8.0, 0, DecisionReason.OPERATOR, 9),
    )


def test_before_the_first_step_nothing_is_counted():
    log = DecisionLog(Clock())
    assert (log.counts, log.lengths, log.changes) == ({}, (), ())


def test_the_timeline_is_bounded():
    log = DecisionLog(Clock())
    for index in range(2 * MAX_KEPT_CHANGES):
        log.record(index % 2, DecisionReason.GOODPUT, index)
    assert len(log.changes) == MAX_KEPT_CHANGES
    assert log.changes[-1].num_decoding == 2 * MAX_KEPT_CHANGES - 1


@pytest.mark.parametrize(
    ("most", "depth", "sizes"),
    [
        pytest.param(16, 4, (16, 7), id="smaller ones fill the rows of graphs"),
        pytest.param(64, 6, (64, 31, 15, 7), id="all of them"),
        pytest.param(32, 7, (32, 15), id="a tree has more tokens than its depth"),
        pytest.param(11, 3, (11,), id="a little less is not worth a size"),
        pytest.param(4, 4, (), id="a chain"),
        pytest.param(0, 4, (), id="no trees are configured"),
        pytest.param(16, 0, (), id="no drafts"),
    ],
)
def test_trees_have_sizes_up_to_the_largest(most, depth, sizes):
    assert [each.num_draft_tokens for each in trees(most, depth)] == list(sizes)
    assert all(each.is_tree and each.depth == depth for each in trees(most, depth))
    assert trees(most, depth, is_fixed=True) == trees(most, depth)[:1]
