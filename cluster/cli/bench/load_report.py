"""The report of `specdec bench serve`, as text, as JSON and as charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.cli.bench.charts import LineChart, draw_charts
from cluster.cli.bench.load import LatencyName, LoadSummary, RequestRecord, latency_ms, percentile
from specdec.types.reports.stats import SpeculationStats

_ONE_IN = (2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Load:
    """Load of one run. None means no concurrency limit, or no request rate."""

    max_concurrency: int | None
    request_rate: float | None

    @property
    def label(self) -> str:
        """Text for reports and charts."""
        limit = "" if self.max_concurrency is None else f"concurrency {self.max_concurrency}"
        if self.request_rate is None:
            return limit or "all at once"
        rate = f"{self.request_rate:g} requests/s"
        return f"{rate}, {limit}" if limit else rate


@dataclass(frozen=True)
class LoadRun:
    """A load and its results."""

    load: Load
    summary: LoadSummary


@dataclass(frozen=True)
class LoadReport:
    """Parameters and results of all runs."""

    backend: str
    model: str
    parameters: Mapping[str, Any]
    runs: Sequence[LoadRun]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON data, with the field names of `vllm bench serve`."""
        head = {"backend": self.backend, "model": self.model, **self.parameters}
        return {**head, "runs": [_run_as_json(run) for run in self.runs]}


def lines(report: LoadReport, latencies: Sequence[LatencyName]) -> Iterator[str]:
    """Yield the lines of the text report: a block for each run."""
    for index, run in enumerate(report.runs):
        if index:
            yield ""
        yield f"{report.model}, {report.backend}, {run.load.label}"
        yield from _counts(run.summary)
        yield from _latencies(run.summary, latencies)
        if run.summary.speculation is not None:
            yield f"{'drafts':<10}{_drafts(run.summary.speculation)}"


def _counts(summary: LoadSummary) -> Iterator[str]:
    failed = f", {summary.failed} failed" if summary.failed else ""
    yield (
        f"{'requests':<10}{summary.completed} in {summary.duration_s:.2f} s{failed}, "
        f"{summary.request_throughput:.2f} requests/s, peak concurrency {summary.peak_concurrency}"
    )
    if summary.errors:
        errors = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.errors.items()))
        yield f"{'errors':<10}{errors}"
    if summary.request_goodput is not None:
        yield f"{'goodput':<10}{summary.request_goodput:.2f} requests/s"
    yield (
        f"{'tokens':<10}{summary.total_input_tokens} input, {summary.total_output_tokens} output, "
        f"{summary.output_throughput:.1f} output tokens/s"
    )
    if summary.max_lateness_s >= 1:
        yield f"{'late':<10}requests were sent up to {summary.max_lateness_s:.1f} s after due"


def _latencies(summary: LoadSummary, latencies: Sequence[LatencyName]) -> Iterator[str]:
    shown = {
        name: summary.latencies_ms[name].statistics
        for name in latencies
        if name in summary.latencies_ms
    }
    if not shown:
        return
    columns = next(iter(shown.values()))
    yield f"{'ms':<10}" + "".join(f"{column:>10}" for column in columns)
    for name, statistics in shown.items():
        yield f"{name:<10}" + "".join(f"{value:>10.1f}" for value in statistics.values())


def _drafts(speculation: SpeculationStats) -> str:
    if not speculation.num_drafts:
        return "none"
    return (
        f"{speculation.num_drafts}, acceptance rate {speculation.acceptance_rate:.0%}, "
        f"acceptance length {speculation.mean_acceptance_length:.2f}"
    )


def _run_as_json(run: LoadRun) -> dict[str, Any]:
    fields = asdict(run.summary)
    del fields["latencies_ms"], fields["speculation"]
    fields["duration"] = fields.pop("duration_s")
    fields["errors"] = dict(run.summary.errors)
    for name, each in run.summary.latencies_ms.items():
        for statistic, value in {**each.statistics, "std": each.std}.items():
            fields[f"{statistic}_{name}_ms"] = value
    if (speculation := run.summary.speculation) is not None:
        fields["spec_decode_num_drafts"] = speculation.num_drafts
        fields["spec_decode_draft_tokens"] = speculation.num_draft_tokens
        fields["spec_decode_accepted_tokens"] = speculation.num_accepted_tokens
        fields["spec_decode_acceptance_rate"] = speculation.acceptance_rate
        fields["spec_decode_acceptance_length"] = speculation.mean_acceptance_length
    return {**asdict(run.load), **fields}


def plot(
    report: LoadReport,
    records: Sequence[Sequence[RequestRecord]],
    latencies: Sequence[LatencyName],
) -> str:
    """Draw throughput and latencies over the load, or the tail latencies of a single run.

    records: of each run.
    """
    if len(report.runs) > 1:
        return draw_charts(_load_sweep(report, latencies))
    return draw_charts(_tail_latencies(report, records[0], latencies))


def _load_sweep(report: LoadReport, latencies: Sequence[LatencyName]) -> list[LineChart]:
    loads = [run.load for run in report.runs]
    has_one_limit = len({each.max_concurrency for each in loads}) == 1
    by_rate = has_one_limit and loads[0].request_rate is not None
    label = "requests per second" if by_rate else "maximum concurrency"
    runs = sorted(report.runs, key=lambda run: _x(run, by_rate))
    x = [_x(run, by_rate) for run in runs]
    throughput = [run.summary.output_throughput for run in runs]
    title = f"{report.model}: output tokens per second"
    charts = [LineChart(title, label, x, {"tokens per second": throughput})]
    for name in latencies:
        found = [run.summary.latencies_ms.get(name) for run in runs]
        statistics = [{} if each is None else each.statistics for each in found]
        shown = next(filter(None, statistics), {"mean": math.nan, "median": math.nan})
        series = {each: [values.get(each, math.nan) for values in statistics] for each in shown}
        charts.append(LineChart(f"{report.model}: {name}, ms", label, x, series))
    return charts


def _x(run: LoadRun, by_rate: bool) -> float:
    load = run.load.request_rate if by_rate else run.load.max_concurrency
    assert load is not None, "every run of a sweep has a rate or a limit"
    return load


def _tail_latencies(
    report: LoadReport, records: Sequence[RequestRecord], latencies: Sequence[LatencyName]
) -> list[LineChart]:
    """Chart the latency that one in N values exceeds, over N on a logarithmic axis."""
    charts = []
    done = [record for record in records if record.usage is not None]
    for name in latencies:
        values = sorted(ms for record in done for ms in latency_ms(record, name))
        if values:
            x = [one_in for one_in in _ONE_IN if one_in <= max(len(values), 2)]
            y = [percentile(values, 100 - 100 / one_in) for one_in in x]
            title = f"{report.model}, {report.runs[0].load.label}: {name}, ms"
            charts.append(LineChart(title, "exceeded by one in N", x, {name: y}))
    return charts
