"""The report of `specdec bench serve`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.cli.bench.load_statistics import LatencyName, LoadSummary
from specdec.types.stats import SpeculationStats


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
        f"mean acceptance length {speculation.mean_acceptance_length:.2f}"
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
