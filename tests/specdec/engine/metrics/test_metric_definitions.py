"""Definitions of an engine's metrics: the values of their labels."""

from specdec.engine.metrics.metric_definitions import ENGINE_METRICS
from specdec.types.reports.stats import Counts, EngineReport


def decisions(counts):
    """Return the steps by the reason of their decision, as they are exposed."""
    [spec] = [each for each in ENGINE_METRICS if each.name == "speculation_decisions"]
    return {each.labels: each.value for each in spec.read(EngineReport(counts=counts))}


def test_a_renamed_reason_is_counted_under_its_former_name_too():
    by_reason = decisions(Counts(decisions={"drafter_unavailable": 2, "goodput": 5}))
    assert by_reason["drafter_unavailable",] == by_reason["drafter_away",] == 2
    others = [value for (reason,), value in by_reason.items() if reason != "drafter_away"]
    assert sum(others) == 7, "each step once without the former name"


def test_every_reason_has_a_series_before_its_first_step():
    assert set(decisions(Counts()).values()) == {0}
