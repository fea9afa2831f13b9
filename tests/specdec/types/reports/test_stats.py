# Modules: specdec.types.reports.additive
"""Counters: their sums, and drafts by method and position."""

from specdec.types.reports.stats import Counts, DraftCounter, SpeculationStats


def test_tokens_are_counted_by_position_of_drafts_of_different_lengths():
    drafts = DraftCounter()
    assert drafts.added_to(Counts()) == Counts()
    for num_draft_tokens, num_accepted_tokens in [(3, 2), (0, 0), (1, 1), (4, 0), (4, 4)]:
        drafts.record("ngram", num_draft_tokens, num_accepted_tokens)
    counts = drafts.added_to(Counts())
    assert counts.accepted_by_position == (3, 2, 1, 1)
    assert counts.drafted_by_position == (4, 3, 3, 2)
    assert counts.reached_by_position == (4, 2, 2, 1), "after accepted tokens alone"


def test_a_step_is_counted_once_if_it_has_a_draft():
    drafts = DraftCounter()
    for lengths in [(3, 1), (0, 0), (), (0, 2)]:
        for length in lengths:
            drafts.record("ngram", length, 0)
        drafts.end_step()
    assert drafts.added_to(Counts()).num_drafted_steps == 2


def test_a_draft_is_counted_in_the_totals_and_for_its_method():
    drafts = DraftCounter()
    for drafter, drafted, accepted in [("ngram", 3, 2), ("draft_model", 2, 2), ("suffix", 0, 0)]:
        drafts.record(drafter, drafted, accepted)
    counts = drafts.added_to(Counts(num_steps=7))
    assert counts.num_steps == 7
    assert counts.speculation == SpeculationStats(2, 5, 4)
    assert counts.accepted_by_position == (2, 2, 0)
    assert counts.drafted_by_position == (2, 2, 1)
    assert counts.accepted_by_method == {"ngram": (1, 1, 0), "draft_model": (1, 1)}
    assert counts.drafted_by_method == {"ngram": (1, 1, 1), "draft_model": (1, 1)}
