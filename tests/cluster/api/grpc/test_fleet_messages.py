"""Sums of counts."""

from grpc import StatusCode

from specdec.client import Counts, HistogramCounts
from specdec.engine.metrics.metrics import FAILURE_CODES, Metrics
from specdec.types.reports.stats import SpeculationStats


def test_a_hand_worked_sum():
    left = Counts(
        num_requests=1,
        num_steps=10,
        speculation=SpeculationStats(2, 6, 3),
        accepted_by_position=(2, 1),
        decisions={"goodput": 9, "probe": 1},
        histograms={"ttft": HistogramCounts((1.0, 2.0), (3, 0, 1), 5.5)},
        accepted_by_method={"ngram": (2, 1)},
        ended={"stop": 1},
    )
    right = Counts(
        num_requests=2,
        num_generated_tokens=7,
        speculation=SpeculationStats(1, 3, 3),
        accepted_by_position=(1, 1, 1),
        decisions={"goodput": 1, "threshold": 4},
        histograms={"ttft": HistogramCounts((1.0, 2.0), (1, 1, 0), 2.0)},
        accepted_by_method={"ngram": (1, 1, 1), "suffix": (4,)},
        num_catch_up_tokens=5,
    )
    assert Counts.sum((left, right)) == Counts(
        num_requests=3,
        num_generated_tokens=7,
        num_steps=10,
        speculation=SpeculationStats(3, 9, 6),
        accepted_by_position=(3, 2, 1),
        decisions={"goodput": 10, "probe": 1, "threshold": 4},
        histograms={"ttft": HistogramCounts((1.0, 2.0), (4, 1, 1), 7.5)},
        accepted_by_method={"ngram": (3, 2, 1), "suffix": (4,)},
        ended={"stop": 1},
        num_catch_up_tokens=5,
    )
    assert left.speculation == SpeculationStats(2, 6, 3), "what was added up has changed"
    assert Counts.sum(()) == Counts()


def test_engine_requests_and_models_are_counted_together():
    metrics = Metrics()
    metrics.num_refused = 9
    metrics.count_end("stop")
    metrics.count_failure(StatusCode.INTERNAL)
    engine = Counts(
        num_steps=40,
        num_prompt_tokens=50,
        num_generated_tokens=100,
        speculation=SpeculationStats(10, 30, 20),
        accepted_by_position=(9, 7, 4),
        decisions={"goodput": 30, "threshold": 10},
        decided_lengths=(10, 0, 30),
        drafted_by_method={"ngram": (10, 10, 10)},
        accepted_by_method={"ngram": (9, 7, 4)},
        num_preemptions=2,
    )
    models = Counts(num_target_restarts=1, num_draft_restarts=2, num_catch_up_tokens=77)
    assert Counts.sum((engine, metrics.counts, models)) == Counts(
        9,
        50,
        100,
        40,
        SpeculationStats(10, 30, 20),
        (9, 7, 4),
        {"goodput": 30, "threshold": 10},
        metrics.histograms,
        decided_lengths=(10, 0, 30),
        drafted_by_method={"ngram": (10, 10, 10)},
        accepted_by_method={"ngram": (9, 7, 4)},
        ended={"stop": 1, "length": 0, "abort": 0, "error": 0},
        failed=dict.fromkeys(FAILURE_CODES, 0) | {"INTERNAL": 1},
        num_preemptions=2,
        num_target_restarts=1,
        num_draft_restarts=2,
        num_catch_up_tokens=77,
        audits=metrics.counts.audits,
    )
