"""Counts of several replicas added up."""

from datetime import UTC, datetime, timedelta

from grpc import StatusCode

from cluster.replica.report import decision_fields
from specdec.client import Counts, HistogramCounts
from specdec.engine.metrics import Metrics, counts_of
from specdec.types.counters import ModelCounts
from specdec.types.draft_decision import Decision, DecisionChange, DecisionReason, chain
from specdec.types.stats import EngineStats, SpeculationStats

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)


def stats(**changes):
    values = dict.fromkeys(
        ("num_running", "num_decoding", "num_waiting", "num_blocks", "num_free_blocks"), 0
    )
    values |= {
        "num_steps": 40,
        "num_preemptions": 0,
        "num_prompt_tokens": 50,
        "num_cached_tokens": 0,
        "num_prefill_chunks": 0,
        "num_generated_tokens": 100,
        "num_lookahead_tokens": 0,
        "last_batch_size": 0,
        "is_speculation_on": True,
        "num_speculation_flips": 0,
        "speculation": SpeculationStats(10, 30, 20),
        "accepted_by_position": (9, 7, 4),
    }
    return EngineStats(**{**values, **changes})


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


def test_what_a_replica_reports_of_its_engine():
    decisions = {DecisionReason.GOODPUT: 30, DecisionReason.THRESHOLD: 10}
    metrics = Metrics()
    metrics.count_end("stop")
    metrics.count_failure(StatusCode.INTERNAL)
    engine = stats(
        decisions=decisions,
        decided_lengths=(10, 0, 30),
        drafted_by_method={"ngram": (10, 10, 10)},
        accepted_by_method={"ngram": (9, 7, 4)},
        num_preemptions=2,
    )
    assert counts_of(engine, 9, metrics, ModelCounts(1, 2, 77)) == Counts(
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
        ended={"stop": 1, "length": 0, "abort": 0},
        failed={"INTERNAL": 1},
        num_preemptions=2,
        num_target_restarts=1,
        num_draft_restarts=2,
        num_catch_up_tokens=77,
    )


def test_decisions_are_told_by_the_clock_of_the_wall():
    fields = decision_fields(
        stats(
            decision=Decision(chain(2), DecisionReason.GOODPUT),
            decisions={DecisionReason.GOODPUT: 1},
            decision_changes=(DecisionChange(90.0, 2, DecisionReason.GOODPUT, 5),),
        ),
        100.0,
        NOW,
    )
    assert (fields["num_chosen_tokens"], fields["decision_reason"]) == (2, "goodput")
    [change] = fields["decision_changes"]
    assert change.at == (NOW - timedelta(seconds=10)).replace(microsecond=600_000)
    assert (change.num_draft_tokens, change.reason, change.num_decoding) == (2, "goodput", 5)


def test_before_the_first_step_nothing_was_decided():
    fields = decision_fields(
        stats(decision=Decision(chain(3), DecisionReason.THRESHOLD)), 100.0, NOW
    )
    assert fields == {"num_chosen_tokens": 0, "decision_reason": "", "decision_changes": ()}
