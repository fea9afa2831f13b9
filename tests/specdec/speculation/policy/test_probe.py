"""Tests of the probes of shapes that are not in use."""

import pytest

from specdec.speculation.policy.probe import Probe
from specdec.types.drafts.draft_decision import DraftAhead, chain, chains, tree, trees

STEP_S = 0.02


THREE = chains(3)


def begun(shapes=THREE, chosen=1, may_pay=None, probe=None):
    """Return the probe, or a new one, begun beside a shape; all may pay where nothing is given."""
    probe, count = probe or Probe(0.0), len(shapes)
    probe.begin(10.0, shapes, chosen, [1.0] * count, may_pay or [True] * count, STEP_S)
    return probe


def probed(shapes, chosen, may_pay=None, count=6):
    """Return the shapes of probes that follow each other, without repetitions."""
    probe, seen = Probe(0.0), []
    for _ in range(count):
        begun(shapes, chosen, may_pay, probe=probe)
        seen.append(probe.shape)
        probe.end(10.0, 1.0)
    return list(dict.fromkeys(seen))


def test_the_shapes_beside_the_chosen_one_and_no_draft_are_tried_in_turn():
    assert probed(chains(5), 3) == [chain(4), chain(2), chain(0)]
    assert probed(chains(5), 1) == [chain(2), chain(0)]
    assert probed(chains(5), 0) == [chain(1)]
    assert probed(chains(5), 5) == [chain(4), chain(0)]


def test_a_tree_and_other_drafts_ahead_are_tried_too():
    shapes = (*chains(2), tree(8, depth=2))
    assert probed(shapes, 1) == [chain(2), chain(0), tree(8, depth=2)]
    ahead = [each.with_ahead(DraftAhead.CONTINUING) for each in chains(2)[1:]]
    assert probed((*chains(2), *ahead), 0) == [chain(1), ahead[0]]


@pytest.mark.parametrize("chosen", trees(32, 4))
def test_beside_a_tree_the_chain_of_its_depth_and_other_trees_are_tried(chosen):
    shapes = (*chains(4), *trees(32, 4))
    tried = probed(shapes, shapes.index(chosen), count=len(shapes))
    assert set(tried) == {chain(0), chain(4), *trees(32, 4)} - {chosen}


def test_only_shapes_that_may_pay_are_tried():
    shapes = chains(4)
    assert probed(shapes, 0, [True, False, False, True, True]) == [chain(3)]
    assert probed(shapes, 2, [False, True, True, True, True]) == [chain(3), chain(1)]
    assert begun(shapes, 0, [True, *[False] * 4]).shape is None


def test_a_probe_ends_after_enough_steps_and_drafts():
    probe = begun()
    for _ in range(6):
        assert not probe.is_over(10.1, is_partial=False)
        probe.observe(0.0, is_typical=True)
    probe.num_drafts_left -= 15
    assert not probe.is_over(10.1, is_partial=False)
    probe.num_drafts_left -= 1
    assert probe.is_over(10.1, is_partial=False)


def test_a_probe_of_few_sequences_needs_no_typical_steps():
    probe = begun()
    probe.num_drafts_left = 0
    assert probe.is_over(10.1, is_partial=True)
    assert not probe.is_over(10.1, is_partial=False)


@pytest.mark.parametrize(("step_s", "longest_s"), [(0.02, 1.0), (0.5, 6.0)])
def test_a_probe_ends_after_a_second_or_a_dozen_steps(step_s, longest_s):
    probe = Probe(0.0)
    probe.begin(10.0, chains(3), 0, [1.0] * 4, [True] * 4, step_s)
    assert not probe.is_over(10.0 + longest_s - 0.01, is_partial=False)
    assert probe.is_over(10.0 + longest_s, is_partial=False)


def test_each_probe_without_a_change_doubles_the_wait_up_to_a_minute():
    probe, waits = Probe(0.0), []
    for _ in range(6):
        begun(probe=probe)
        probe.end(11.0, 1.0)
        waits.append(probe.due_at_s - 11.0)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_shape_that_was_much_better_than_expected_is_tried_again_soon():
    probe = Probe(0.0)
    for goodput, wait_s in ((1.0, 5.0), (1.0, 10.0), (1.1, 5.0), (1.04, 10.0)):
        begun(probe=probe)
        probe.end(11.0, goodput)
        assert probe.due_at_s - 11.0 == wait_s


@pytest.mark.parametrize(
    ("lost_s", "wait_s", "of_next_s"),
    [(-1.0, 5.0, 6.0), (0.02, 5.0, 6.0), (0.3, 30.0, 30.0), (9.0, 300.0, 300.0)],
)
def test_probes_lose_at_most_a_hundredth_of_the_time(lost_s, wait_s, of_next_s):
    """of_next_s: the wait of a probe beside another shape, which was chosen a second later."""
    probe = begun()
    for _ in range(2):
        probe.observe(lost_s / 2, is_typical=True)
    probe.end(11.0, 1.0)
    assert probe.due_at_s - 11.0 == pytest.approx(wait_s)
    assert probe.restarted(12.0).due_at_s - 11.0 == pytest.approx(of_next_s)


def test_a_check_out_of_turn_adds_to_the_wait_for_what_the_last_probe_lost():
    probe = begun()
    probe.observe(0.5, is_typical=True)
    probe.end(11.0, 1.0)
    probe.check(12.0, 1.0, STEP_S)
    probe.observe(0.1, is_typical=True)
    probe.cancel(12.5)
    assert probe.due_at_s == pytest.approx(11.0 + 50.0 + 10.0)


def test_a_probe_prefers_a_step_without_prompts():
    probe = Probe(10.0)
    assert not probe.is_due(9.9, has_prompts=False)
    assert probe.is_due(10.0, has_prompts=False)
    assert not probe.is_due(14.9, has_prompts=True)
    assert probe.is_due(15.0, has_prompts=True)
