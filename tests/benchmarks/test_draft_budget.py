"""Figures of docs/tuning.md: where a divided budget gains, and where it loses."""

from benchmarks.draft_budget import Case, gain


def test_a_divided_budget_gains_where_rates_differ_and_drafts_are_cheap():
    assert gain(Case("two kinds", 8, 4, 0.0), 300) > 1.15
    assert gain(Case("mixed", 8, 4, 0.0), 300) > 1.03
    assert 0.96 < gain(Case("equal", 8, 4, 0.0), 300) < 1.01


def test_it_loses_where_the_longest_draft_costs_passes_of_a_model():
    assert gain(Case("equal", 8, 2, 0.1), 300) < 0.95


def test_the_simulation_is_deterministic():
    case = Case("mixed", 4, 3, 0.02)
    assert gain(case, 50) == gain(case, 50)
