"""`specdec bench serve`: measures a service under load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import click

from cluster.cli.bench.arrivals import arrival_times
from cluster.cli.bench.backend import Backend
from cluster.cli.bench.load import Record, ask_all
from cluster.cli.bench.load_flags import load_flags
from cluster.cli.bench.load_options import LoadOptions
from cluster.cli.bench.load_plot import plot
from cluster.cli.bench.load_report import Load, LoadReport, LoadRun, lines
from cluster.cli.bench.load_statistics import summarize
from cluster.cli.bench.questions import QuestionSource
from cluster.cli.bench.unused_flags import refuse_unused_flags
from cluster.cli.connection_options import client_flags
from cluster.cli.errors import EXIT_FAILED
from cluster.cli.help import SectionedCommand
from cluster.cli.output import json_flag, progress_bar, show_json

_WARM_UP = -1
"""The number of the run whose questions are not measured."""


@click.command("serve", cls=SectionedCommand)
@json_flag
@client_flags
@load_flags
@click.pass_context
def bench_serve(ctx: click.Context, /, as_json: bool, **given: Any) -> None:
    """Measure a service under load, over gRPC or the OpenAI API.

    In a closed loop (--max-concurrency) or an open one (--request-rate), with random words or the
    prompts of a file. What each figure means is in docs/cli.md. Exit code 1 where no request
    succeeded.
    """
    options = LoadOptions(**given)
    refuse_unused_flags(ctx, options)
    loads, source = options.loads, options.questions
    with closing(options.connect()) as backend:
        _warm_up(backend, source, options.num_warmups)
        records = [_measure(backend, source, options, load, run) for run, load in enumerate(loads)]
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


def _warm_up(backend: Backend, source: QuestionSource, count: int) -> None:
    """What fails here fails again where it is counted."""
    ask_all(backend, source.questions(count, _WARM_UP), [None] * count, 1, lambda: None)


def _measure(
    backend: Backend, source: QuestionSource, options: LoadOptions, load: Load, run: int
) -> list[Record]:
    questions = source.questions(options.num_prompts, run)
    due_s = _due_s(len(questions), load, options)
    with progress_bar(len(questions), "request", load.words) as advance:
        return ask_all(backend, questions, due_s, load.max_concurrency, advance)


def _due_s(count: int, load: Load, options: LoadOptions) -> Sequence[float | None]:
    if load.request_rate is None:  # all at once, or a place at a time
        return [0.0 if load.max_concurrency is None else None] * count
    return arrival_times(count, load.request_rate, options.burstiness, options.seed)


def _report(
    options: LoadOptions, model: str, loads: Sequence[Load], records: Sequence[Sequence[Record]]
) -> LoadReport:
    runs = [
        LoadRun(load, summarize(each, options.metric_percentiles, options.objectives_ms))
        for load, each in zip(loads, records, strict=True)
    ]
    return LoadReport(options.backend, model, options.asked, runs)
