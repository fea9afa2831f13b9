"""Charts of the results of `specdec bench serve`, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.cli.bench.load import RequestRecord
from cluster.cli.bench.load_report import LoadReport, LoadRun
from cluster.cli.bench.load_statistics import LatencyName, latency_ms, percentile
from cluster.cli.charts import LineChart, draw_charts

_ONE_IN = (2, 5, 10, 20, 50, 100, 200, 500, 1000)


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
    runs = sorted(report.runs, key=lambda run: _load(run, by_rate))
    x = [_load(run, by_rate) for run in runs]
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


def _load(run: LoadRun, by_rate: bool) -> float:
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
