"""Charts of what `specdec bench serve` measured, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.cli.bench.load import Record
from cluster.cli.bench.load_report import LoadReport, LoadRun
from cluster.cli.bench.load_statistics import LatencyName, latency_ms, percentile
from cluster.cli.charts import LineChart, line_charts

_ONE_IN = (2, 5, 10, 20, 50, 100, 200, 500, 1000)


def plot(
    report: LoadReport, records: Sequence[Sequence[Record]], latencies: Sequence[LatencyName]
) -> str:
    """Of several runs throughput and latencies over the load; of one how its latencies spread.

    records: of each run.
    """
    if len(report.runs) > 1:
        return line_charts(_over_loads(report, latencies))
    return line_charts(_spread(report, records[0], latencies))


def _over_loads(report: LoadReport, latencies: Sequence[LatencyName]) -> list[LineChart]:
    loads = [run.load for run in report.runs]
    has_one_limit = len({each.max_concurrency for each in loads}) == 1
    by_rate = has_one_limit and loads[0].request_rate is not None
    label = "requests a second" if by_rate else "most requests at once"
    runs = sorted(report.runs, key=lambda run: _load(run, by_rate))
    x = [_load(run, by_rate) for run in runs]
    throughput = [run.summary.output_throughput for run in runs]
    title = f"{report.model}: output tokens a second"
    charts = [LineChart(title, label, x, {"tokens a second": throughput})]
    for name in latencies:
        series = {
            shown: [_statistic(run, name, shown) for run in runs]
            for shown in ("mean", "median", *_percents(report, name))
        }
        charts.append(LineChart(f"{report.model}: {name}, ms", label, x, series))
    return charts


def _load(run: LoadRun, by_rate: bool) -> float:
    load = run.load.request_rate if by_rate else run.load.max_concurrency
    assert load is not None, "a sweep names each of its loads"
    return load


def _percents(report: LoadReport, name: LatencyName) -> list[str]:
    for run in report.runs:
        if name in run.summary.latencies_ms:
            return [f"p{percent:g}" for percent in run.summary.latencies_ms[name].percentiles]
    return []


def _statistic(run: LoadRun, name: LatencyName, statistic: str) -> float:
    """Not a number where no answer of the run has this latency."""
    found = run.summary.latencies_ms.get(name)
    if found is None:
        return math.nan
    if statistic.startswith("p"):
        return {f"p{percent:g}": value for percent, value in found.percentiles.items()}[statistic]
    return found.mean if statistic == "mean" else found.median


def _spread(
    report: LoadReport, records: Sequence[Record], latencies: Sequence[LatencyName]
) -> list[LineChart]:
    """The tail on a logarithmic axis: what one value in so many exceeds."""
    charts = []
    done = [record for record in records if record.usage is not None]
    for name in latencies:
        values = sorted(ms for record in done for ms in latency_ms(record, name))
        x = [one_in for one_in in _ONE_IN if one_in <= max(len(values), 2)]
        y = [percentile(values, 100 - 100 / one_in) for one_in in x] if values else []
        if values:
            title = f"{report.model}, {report.runs[0].load.words}: {name}, ms"
            charts.append(LineChart(title, "exceeded once in so many", x, {name: y}))
    return charts
