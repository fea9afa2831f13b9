# Modules: specdec.engine.metrics.request_metrics
"""Metrics of a replica after hand-worked runs."""

import random
import threading

import pytest
from grpc import StatusCode

from specdec.client import Counts, HistogramCounts
from specdec.engine.metrics import metrics as names
from specdec.engine.metrics.metrics import Histogram, Metrics
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.types.errors import OverloadedError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import SamplingParams


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def observer(metrics):
    return RequestMetrics("r", metrics, clock=lambda: 100.0)


def output(finish_reason, choice=0, is_last=None, num_steps=1):
    is_last = finish_reason is not None if is_last is None else is_last
    return EngineOutput(
        "r",
        (5,),
        "text",
        finish_reason,
        num_prompt_tokens=12,
        num_output_tokens=5,
        speculation=SpeculationStats(2, 6, 3),
        num_steps=num_steps,
        choice=choice,
        is_last=is_last,
    )


def summary(metrics, name):
    """Return the number of observations and their sum."""
    counts = metrics.histograms[name]
    return sum(counts.counts), counts.total


def test_bounds_are_inclusive_and_the_last_bucket_has_the_rest():
    histogram = Histogram((1, 2, 4))
    for value in (0.5, 1, 2, 2, 3, 5000):
        histogram.observe(value)
    assert histogram.read() == HistogramCounts((1.0, 2.0, 4.0), (2, 2, 1, 1), 5008.5)


def test_observations_of_several_threads_are_all_counted():
    histogram = Histogram((1,))
    threads = [
        threading.Thread(target=lambda: [histogram.observe(1) for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert histogram.read() == HistogramCounts((1.0,), (20_000, 0), 20_000.0)


def test_each_phase_of_a_request_is_observed(metrics, observer):
    observer.on_scheduled(100.25)
    for at, finish_reason in [(100.5, None), (100.75, None), (102.0, FinishReason.STOP)]:
        observer.on_output(output(finish_reason), at)
    assert summary(metrics, names.QUEUE_TIME) == (1, 0.25)
    assert summary(metrics, names.PREFILL_TIME) == (1, 0.25)
    assert summary(metrics, names.FIRST_TOKEN) == (1, 0.5)
    assert summary(metrics, names.INTER_TOKEN) == (2, 1.5)
    assert summary(metrics, names.DECODE_TIME) == (1, 1.5)
    assert summary(metrics, names.END_TO_END) == (1, 2.0)
    assert summary(metrics, names.PROMPT_TOKENS) == (1, 12)
    assert summary(metrics, names.GENERATION_TOKENS) == (1, 5)
    assert summary(metrics, names.INFERENCE_TIME) == (1, 1.75)
    assert summary(metrics, names.MAX_GENERATION_TOKENS) == (1, 5)
    assert summary(metrics, names.TIME_PER_OUTPUT_TOKEN) == (1, 1.5 / 4)


def test_a_token_of_a_plain_decode_counts_as_its_output(metrics, observer):
    first = output(None)
    observer.on_output(first, 100.5)
    assert observer.latest is first
    for at in (100.75, 101.5):
        observer.on_token(at)
    assert observer.latest == first._replace(num_output_tokens=first.num_output_tokens + 2)
    last = output(FinishReason.STOP)
    observer.on_output(last, 102.0)
    assert observer.latest is last
    assert summary(metrics, names.INTER_TOKEN) == (3, 1.5)


def test_choices_share_one_request_with_separate_inter_token_latencies(metrics, observer):
    observer.on_output(output(None), 100.5)
    observer.on_output(output(None, choice=1), 101.0)
    observer.on_output(output(FinishReason.STOP, is_last=False), 101.5)
    observer.on_output(output(FinishReason.LENGTH, choice=1), 103.0)
    assert summary(metrics, names.FIRST_TOKEN) == (1, 0.5)
    assert summary(metrics, names.INTER_TOKEN) == (2, 3.0)
    assert summary(metrics, names.END_TO_END) == (1, 3.0)
    assert metrics.ended == {"length": 1, "stop": 1, "abort": 0, "error": 0}


def test_steps_sent_together_share_the_time_evenly(metrics, observer):
    observer.on_output(output(None), 101.0)
    observer.on_output(output(None, num_steps=4), 103.0)
    counts = metrics.histograms[names.INTER_TOKEN]
    assert counts.counts[counts.bounds.index(0.5)] == 4


@pytest.mark.parametrize(
    ("error", "reason"), [(GeneratorExit(), "abort"), (OverloadedError("expired"), "error")]
)
def test_a_stream_that_is_broken_off_counts_once_without_latency(metrics, observer, error, reason):
    observer.on_broken_off(error)
    observer.on_refused(error, 1)
    assert metrics.ended == {"length": 0, "stop": 0, "abort": 0, "error": 0, reason: 1}
    assert (metrics.num_refused, summary(metrics, names.END_TO_END)) == (0, (0, 0))


@pytest.mark.parametrize(("error", "reason"), [(GeneratorExit(), "abort"), (ValueError(), "error")])
def test_choices_that_had_not_ended_are_broken_off(metrics, observer, error, reason):
    observer.on_queued(SamplingParams(n=3), seed=0)
    observer.on_output(output(FinishReason.STOP, choice=1, is_last=False), 101.0)
    observer.on_choice_end(output(FinishReason.STOP, choice=1, is_last=False), 1)
    observer.on_broken_off(error)
    assert metrics.ended == {"length": 0, "stop": 1, "abort": 0, "error": 0, reason: 2}


def test_a_request_that_leaves_before_it_is_accepted_has_all_its_choices(metrics, observer):
    observer.on_refused(GeneratorExit(), 4)
    assert (metrics.num_refused, metrics.ended["abort"]) == (4, 4)


def test_the_latencies_of_a_server_follow_opentelemetry(metrics):
    def begun():
        return RequestMetrics("r", metrics, lambda: 100.0, names.CHAT)

    for finish_reasons in ((None, FinishReason.STOP), (FinishReason.LENGTH,)):
        request = begun()
        for at, each in enumerate(finish_reasons, 101):
            request.on_output(output(each)._replace(num_output_tokens=len(finish_reasons)), at)
    begun().on_refused(ValueError("malformed"), 1)
    begun().on_broken_off(GeneratorExit())
    found = {
        (name, operation, error): (sum(counts.counts), counts.total)
        for name, by_operation in metrics.counts.server_latencies.items()
        for operation, by_error in by_operation.items()
        for error, counts in by_error.items()
    }
    assert found == {
        (names.REQUEST_DURATION, "chat", ""): (2, 3.0),
        (names.REQUEST_DURATION, "chat", "ValueError"): (1, 0.0),
        (names.REQUEST_DURATION, "chat", names.ABORTED): (1, 0.0),
        (names.TO_FIRST_TOKEN, "chat", ""): (2, 2.0),
        (names.PER_OUTPUT_TOKEN, "chat", ""): (1, 1.0),
    }


def test_sums_of_several_processes_never_decrease(metrics):
    """Prometheus takes a sum that is less by a step of rounding for that of a new process."""
    generator, totals, last = random.Random(1), dict[str, float](), 0.0
    for _ in range(1000):
        name = generator.choice("abcde")
        if generator.random() < 0.1:
            metrics.end_part(name)
            totals.pop(name, None)
        else:
            totals[name] = totals.get(name, 0.0) + generator.expovariate(1.0)
            histogram = HistogramCounts((), (1,), totals[name])
            metrics.set_part(name, Counts(histograms={"a": histogram}))
        last, before = metrics.counts.histograms["a"].total, last
        assert last >= before
    assert sum(totals.values()) < last


def test_failures_are_counted_by_status_code(metrics):
    for code in (StatusCode.INTERNAL, StatusCode.UNAVAILABLE, StatusCode.INTERNAL):
        metrics.count_failure(code)
    counted = {"INTERNAL": 2, "UNAVAILABLE": 1}
    assert metrics.counts.failed == dict.fromkeys(names.FAILURE_CODES, 0) | counted


@pytest.mark.parametrize(("max_tokens", "observed"), [(9, (1, 9)), (None, (0, 0))])
def test_the_parameters_and_the_longest_choice_of_a_request_are_observed(
    metrics, observer, max_tokens, observed
):
    params = SamplingParams(n=2, max_tokens=max_tokens)
    observer.on_queued(params, seed=0)
    for choice, at in ((0, 101.0), (1, 101.5), (0, 102.0)):
        observer.on_output(output(None, choice=choice), at)
    observer.on_output(output(FinishReason.STOP, is_last=True), 103.0)
    assert summary(metrics, names.PARAMS_N) == (1, 2)
    assert summary(metrics, names.PARAMS_MAX_TOKENS) == observed
    assert summary(metrics, names.MAX_GENERATION_TOKENS) == (1, 3)
    assert summary(metrics, names.TIME_PER_OUTPUT_TOKEN) == (1, 1.0)


def test_histograms_of_steps_alone_have_their_lock(metrics):
    of_steps = {names.DRAFT_TIME, names.VERIFY_TIME, names.BATCH_SIZE, names.ITERATION_TOKENS}
    for name in names.HISTOGRAMS:
        lock = metrics._step_lock if name in of_steps else metrics._lock
        assert metrics[name]._lock is lock
    with pytest.raises(AssertionError, match="another lock"):
        metrics.observe({names.VERIFY_TIME: 0.5})
    assert summary(metrics, names.VERIFY_TIME) == (0, 0.0)
