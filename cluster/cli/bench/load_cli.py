"""`specdec bench serve`: benchmarks a running service under load."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import click
from click.core import ParameterSource

from cluster.cli.bench.arrivals import arrival_times
from cluster.cli.bench.backend import Backend
from cluster.cli.bench.dataset import Dataset
from cluster.cli.bench.load import RequestRecord, send_requests
from cluster.cli.bench.load_flags import load_flags
from cluster.cli.bench.load_options import LoadOptions
from cluster.cli.bench.load_plot import plot
from cluster.cli.bench.load_report import Load, LoadReport, LoadRun, lines
from cluster.cli.bench.load_statistics import summarize
from cluster.cli.connection_options import client_flags
from cluster.cli.errors import EXIT_FAILED
from cluster.cli.help import SectionedCommand
from cluster.cli.output import json_flag, progress_bar, show_json

_WARM_UP = -1
"""The index of the run that is not measured."""


@click.command("serve", cls=SectionedCommand)
@json_flag
@client_flags
@load_flags
@click.pass_context
def bench_serve(ctx: click.Context, /, as_json: bool, **given: Any) -> None:
    """Benchmark the throughput and latency of a running service.

    Sends requests in a closed loop (--max-concurrency) or at a rate (--request-rate), with random
    words or the prompts of a file, over gRPC or the OpenAI API. Exit code 1 if no request
    succeeded. The metrics are defined in docs/cli.md.
    """
    options = LoadOptions(**given)
    _reject_flags_without_effect(ctx, options)
    loads, dataset = options.loads, options.dataset
    with closing(options.connect()) as backend:
        warmup = dataset.requests(options.num_warmups, _WARM_UP)
        send_requests(backend, warmup, [None] * len(warmup), 1, lambda: None)
        records = [_measure(backend, dataset, options, load, run) for run, load in enumerate(loads)]
        report = _report(options, backend.model, loads, records)
    if as_json:
        show_json(report.as_json())
    else:
        click.echo("\n".join(lines(report, options.percentile_metrics)))
    if options.output is not None:
        options.output.write_text(json.dumps(report.as_json()) + "\n", encoding="utf-8")
    if options.plot is not None:
        markup = plot(report, records, options.percentile_metrics)
        options.plot.write_text(markup, encoding="utf-8")
    if not any(run.summary.completed for run in report.runs):
        ctx.exit(EXIT_FAILED)


def _reject_flags_without_effect(ctx: click.Context, options: LoadOptions) -> None:
    """Raise UsageError for a flag on the command line that has no effect beside the others."""
    flags = {param.name: param.opts[0] for param in ctx.command.params}
    for name, reason in _flags_without_effect(options):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flags[name]} has no effect {reason}", ctx)


def _flags_without_effect(options: LoadOptions) -> Iterator[tuple[str, str]]:
    """Yield parameter names, and the condition under which they have no effect."""
    if options.backend == "grpc":
        yield "base_url", "with --backend grpc; use --address"
        yield "model", "with --backend grpc, which measures the first served model"
    else:
        yield "address", f"with --backend {options.backend}; use --base-url"
        if not options.base_url.startswith("https:"):
            yield "tls_ca_file", "unless --base-url begins with https:"
    if options.dataset_path is None:
        yield "output_len", "without --dataset-path; use --random-output-len"
    else:
        for name in ("input_len", "output_len", "range_ratio", "prefix_len"):
            yield f"random_{name}", "with --dataset-path"
    if all(math.isinf(rate) for rate in options.request_rate or ()):
        yield "burstiness", "without a finite --request-rate"


def _measure(
    backend: Backend, dataset: Dataset, options: LoadOptions, load: Load, run: int
) -> list[RequestRecord]:
    requests = dataset.requests(options.num_prompts, run)
    due_s = _due_s(len(requests), load, options)
    with progress_bar(len(requests), "request", load.label) as advance:
        return send_requests(backend, requests, due_s, load.max_concurrency, advance)


def _due_s(count: int, load: Load, options: LoadOptions) -> Sequence[float | None]:
    if load.request_rate is None:  # all at once, or a closed loop
        return [0.0 if load.max_concurrency is None else None] * count
    return arrival_times(count, load.request_rate, options.burstiness, options.seed)


def _report(
    options: LoadOptions,
    model: str,
    loads: Sequence[Load],
    records: Sequence[Sequence[RequestRecord]],
) -> LoadReport:
    runs = [
        LoadRun(load, summarize(each, options.metric_percentiles, options.objectives_ms))
        for load, each in zip(loads, records, strict=True)
    ]
    return LoadReport(options.backend, model, options.parameters, runs)
