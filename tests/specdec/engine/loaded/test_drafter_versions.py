# Modules: specdec.types.drafters
"""Versions of a draft head: loading, switching, rolling back; on a target without a model."""

from unittest.mock import Mock

import pytest

from specdec.engine.loaded.drafter_versions import MAX_VERSIONS, DrafterVersions
from specdec.speculation.policy.rollback import RollbackRule
from specdec.types.drafters import HeadFile
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.reports.stats import Counts, SpeculationStats

RULE = RollbackRule(min_drafts=8, window=32)


class Ranks:
    """Target that reports a load when a test sets `fault`; `calls` are those that change it."""

    def __init__(self):
        self.begin = self.collect = Mock()
        self.calls = []
        self.fault = ""

    def begin_head_load(self, head):
        self.calls.append(("load", head.version, head.directory))

    def collect_head_load(self):
        return self.fault

    def switch_head(self, version):
        self.calls.append(("switch", version))


@pytest.fixture
def ranks():
    return Ranks()


@pytest.fixture
def versions():
    return DrafterVersions(HeadFile(1, "configured", "/heads/1"), RULE)


def load(versions, ranks, name="new"):
    number = versions.load(name, f"/heads/{name}")
    versions.advance(ranks)
    return number


def observe(versions, number, num_drafts, num_accepted):
    """Report drafts of 3 tokens, `num_accepted` of them with 2 accepted ones."""
    for index in range(num_drafts):
        accepted = 2 if index < num_accepted else 0
        versions.observe(number, 3, accepted, accepted)


def states(versions):
    return {each.number: each.state.value for each in versions.snapshot()}


def test_a_version_is_active_once_all_ranks_have_it(versions, ranks):
    versions.advance(ranks)
    assert ranks.calls == []
    ranks.fault = None
    number = load(versions, ranks)
    versions.advance(ranks)
    assert (number, versions.active, versions.is_settled) == (2, 1, False)
    assert ranks.calls == [("load", 2, "/heads/new")]
    assert states(versions) == {1: "active", 2: "loading"}
    ranks.fault = ""
    versions.advance(ranks)
    assert (versions.active, versions.is_settled) == (2, True)
    assert ranks.calls[1:] == [("switch", 2)]
    assert states(versions) == {1: "ready", 2: "active"}


def test_a_version_that_a_rank_cannot_load_changes_nothing(versions, ranks):
    ranks.fault = "rank 1: no such file"
    load(versions, ranks)
    assert (versions.active, versions.is_settled) == (1, True)
    assert states(versions) == {1: "active", 2: "failed"}
    assert versions.snapshot()[1].fault == "rank 1: no such file"
    assert ranks.calls == [("load", 2, "/heads/new")]
    ranks.fault = ""
    versions.use(2)
    versions.advance(ranks)
    assert states(versions) == {1: "ready", 2: "active"}
    assert versions.snapshot()[1].fault == ""


def test_one_version_is_loaded_at_a_time(versions, ranks):
    ranks.fault = None
    load(versions, ranks)
    with pytest.raises(OverloadedError, match="is being loaded"):
        versions.load("third", "/heads/3")
    with pytest.raises(OverloadedError, match="is being loaded"):
        versions.use(1)


def test_an_unknown_version_is_refused(versions):
    with pytest.raises(InvalidValueError, match="version is 2; it must be one of 1"):
        versions.use(2)


def test_drafts_are_counted_by_the_version_that_made_them(versions, ranks):
    observe(versions, 1, 5, 3)
    load(versions, ranks)
    observe(versions, 1, 1, 1)  # was made before the switch
    observe(versions, 2, 4, 2)
    versions.observe(2, 0, 0, 0)
    versions.observe(9, 3, 1, 1)
    first, second = versions.snapshot()
    assert first.speculation == SpeculationStats(6, 18, 8)
    assert second.speculation == SpeculationStats(4, 12, 4)
    assert (first.acceptance, second.acceptance) == (4 / 6, 2 / 4)
    counts = Counts()
    versions.add_to(counts)
    assert counts.drafts_by_version == {"1": first.speculation, "2": second.speculation}


def test_a_worse_version_is_rolled_back(versions, ranks):
    observe(versions, 1, 32, 28)
    load(versions, ranks)
    observe(versions, 2, 7, 0)
    assert versions.is_settled
    observe(versions, 2, 1, 0)
    versions.advance(ranks)
    assert (versions.active, versions.num_rollbacks) == (1, 1)
    assert states(versions) == {1: "active", 2: "rolled_back"}
    assert ranks.calls[2:] == [("load", 1, "/heads/1"), ("switch", 1)]
    observe(versions, 2, 50, 0)  # late drafts
    versions.advance(ranks)
    assert (versions.active, versions.num_rollbacks) == (1, 1)


def test_only_the_latest_drafts_of_the_version_before_count(versions, ranks):
    observe(versions, 1, 1000, 1000)
    observe(versions, 1, 32, 0)  # the traffic has changed
    load(versions, ranks)
    observe(versions, 2, 32, 0)
    versions.advance(ranks)
    assert versions.active == 2


def test_a_version_is_compared_while_it_is_new(versions, ranks):
    observe(versions, 1, 32, 28)
    load(versions, ranks)
    observe(versions, 2, 32, 28)
    observe(versions, 2, 1000, 0)
    versions.advance(ranks)
    assert versions.active == 2


def test_a_pinned_version_stays(versions, ranks):
    observe(versions, 1, 32, 28)
    load(versions, ranks)
    versions.is_pinned = True
    observe(versions, 2, 8, 0)
    versions.advance(ranks)
    assert versions.active == 2
    versions.is_pinned = False
    observe(versions, 2, 8, 0)
    versions.advance(ranks)
    assert versions.active == 1


def test_an_ordered_version_stays(versions, ranks):
    load(versions, ranks)
    observe(versions, 2, 32, 28)
    versions.use(1)
    versions.advance(ranks)
    observe(versions, 1, 32, 0)
    versions.advance(ranks)
    assert (versions.active, versions.num_rollbacks) == (1, 0)
    assert states(versions) == {1: "active", 2: "ready"}


def test_a_rollback_that_fails_is_not_tried_again(versions, ranks):
    load(versions, ranks, "second")
    observe(versions, 2, 32, 28)
    load(versions, ranks, "third")
    ranks.fault = "rank 0: no such file"
    observe(versions, 3, 8, 0)
    versions.advance(ranks)
    assert versions.active == 3
    assert states(versions) == {1: "ready", 2: "failed", 3: "active"}
    calls = len(ranks.calls)
    observe(versions, 3, 32, 0)
    versions.advance(ranks)
    assert len(ranks.calls) == calls


def test_a_load_that_fails_does_not_end_a_comparison(versions, ranks):
    observe(versions, 1, 32, 28)
    load(versions, ranks, "second")
    ranks.fault = "rank 0: no such file"
    load(versions, ranks, "third")
    ranks.fault = ""
    observe(versions, 2, 8, 0)
    versions.advance(ranks)
    assert versions.active == 1


def test_after_a_loss_of_the_target_the_version_is_loaded_again(versions, ranks):
    load(versions, ranks)
    observe(versions, 2, 8, 8)
    versions.restart()
    assert (versions.active, states(versions)) == (1, {1: "active", 2: "ready"})
    versions.advance(ranks)
    assert (versions.active, states(versions)) == (2, {1: "ready", 2: "active"})
    assert ranks.calls[2:] == [("load", 2, "/heads/new"), ("switch", 2)]


def test_a_version_with_which_the_target_was_lost_early_is_not_loaded_again(versions, ranks):
    load(versions, ranks, "second")
    observe(versions, 2, 8, 8)
    load(versions, ranks, "third")
    observe(versions, 3, 7, 7)
    versions.restart()
    versions.advance(ranks)
    assert (versions.active, states(versions)) == (2, {1: "ready", 2: "active", 3: "failed"})


def test_a_comparison_continues_after_a_loss_of_the_target(versions, ranks):
    observe(versions, 1, 32, 28)
    load(versions, ranks)
    observe(versions, 2, 15, 12)
    versions.restart()
    observe(versions, 1, 4, 4)  # the ranks have the configured version until 2 is loaded
    versions.advance(ranks)
    assert versions.active == 2
    observe(versions, 2, 17, 0)
    versions.advance(ranks)
    assert (versions.active, versions.num_rollbacks) == (1, 1)
    assert states(versions) == {1: "active", 2: "rolled_back"}


def test_a_rollback_is_complete_where_the_target_is_lost_during_it(versions, ranks):
    load(versions, ranks, "second")
    observe(versions, 2, 32, 28)
    load(versions, ranks, "third")
    observe(versions, 3, 8, 0)
    ranks.fault = None
    versions.advance(ranks)
    versions.restart()
    assert (versions.num_rollbacks, states(versions)[3]) == (1, "rolled_back")
    ranks.fault = ""
    versions.advance(ranks)
    assert (versions.active, versions.num_rollbacks) == (2, 1)
    assert states(versions) == {1: "ready", 2: "active", 3: "rolled_back"}


def test_a_version_that_cannot_be_loaded_again_is_no_longer_compared(versions, ranks):
    observe(versions, 1, 32, 28)
    load(versions, ranks)
    observe(versions, 2, 8, 8)
    versions.restart()
    ranks.fault = "rank 0: no such file"
    versions.advance(ranks)
    assert states(versions) == {1: "active", 2: "failed"}
    ranks.fault = ""
    versions.use(2)
    versions.advance(ranks)
    observe(versions, 2, 24, 0)
    versions.advance(ranks)
    assert (versions.active, versions.num_rollbacks) == (2, 0)


def test_a_version_with_which_the_target_was_lost_while_loading_gives_way(versions, ranks):
    load(versions, ranks, "second")
    observe(versions, 2, 8, 8)
    ranks.fault = None
    load(versions, ranks, "third")
    versions.restart()
    ranks.fault = ""
    versions.advance(ranks)
    assert (versions.active, states(versions)[3]) == (2, "failed")


def test_the_oldest_versions_are_forgotten(versions, ranks):
    for index in range(MAX_VERSIONS + 3):
        load(versions, ranks, str(index))
    numbers = [each.number for each in versions.snapshot()]
    assert len(numbers) == MAX_VERSIONS
    assert (numbers[0], numbers[-1]) == (1, versions.active)


def test_the_version_before_is_not_forgotten_while_it_can_come_back(versions, ranks):
    for index in range(MAX_VERSIONS - 1):
        load(versions, ranks, str(index))
    versions.use(2)
    versions.advance(ranks)
    observe(versions, 2, 32, 28)
    new = load(versions, ranks, "new")
    ranks.fault = "rank 0: no such file"
    load(versions, ranks, "absent")
    ranks.fault = ""
    observe(versions, new, 8, 0)
    versions.advance(ranks)
    assert versions.active == 2
