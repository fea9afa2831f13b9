"""`specdec eval-drafter`: acceptance length and speed of a drafter, by suite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.bench.charts import BarChart, LineChart, draw_charts, require_matplotlib
from cluster.cli.output import (
    Flag,
    combine_flags,
    default_flag,
    json_flag,
    print_stderr,
    progress_bar,
    show_result,
)
from cluster.cli.parameter_types import EXISTING_FILE, NEW_FILE, ListOf
from cluster.cli.tables import aligned, shown_number
from specdec.config.llm import LLMConfig

if TYPE_CHECKING:
    from specdec.training.data.prompts import PromptRecord
    from specdec.training.evaluation import SuiteResult

_MAX_NUM_SEQS = 4
"""One request runs at a time; a small limit keeps the measurement of step times short."""


def _setting_flag(name: str) -> Flag:
    """Return the flag of a setting of the engine, as `specdec serve` has it."""
    setting = LLMConfig.settings()[name]
    kind = click.Choice(setting.limit.options) if setting.limit.options else setting.limit.kind
    return click.option(f"--{name.replace('_', '-')}", type=kind, help=setting.help)


_ENGINE_SETTINGS = ("model", "speculative_config", "dtype", "quantization", "device", "kernels")
_engine_flags = combine_flags(*map(_setting_flag, _ENGINE_SETTINGS))


@click.command("eval-drafter", short_help="Measure acceptance length and speed of a drafter.")
@click.argument("prompts_file", type=EXISTING_FILE)
@_engine_flags
@click.option(
    "--suites",
    type=ListOf("NAME,...", str),
    default=(),
    help="Suites of the file to measure, separated by commas. Default: all.",
)
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    help="Number of prompts of each suite to use. Default: all.",
)
@default_flag(
    "--temperatures",
    type=ListOf("NUMBER,...", float),
    default="0,0.8",
    help="Sampling temperatures, separated by commas.",
)
@default_flag(
    "--max-tokens",
    type=click.IntRange(min=2),
    default=128,
    help="Maximum number of output tokens per answer.",
)
@default_flag(
    "--mode",
    type=click.Choice(["on", "auto"]),
    default="on",
    help="Draft length of a step: on takes the configured one, auto the policy's.",
)
@default_flag("--seed", type=click.IntRange(min=0), default=0, help="Seed.")
@click.option("--output", type=NEW_FILE, help="Write the JSON report to this file.")
@click.option(
    "--card",
    type=NEW_FILE,
    help="Write the acceptance to this card of a drafter, such as RUN/head/card.json.",
)
@click.option(
    "--plot",
    type=NEW_FILE,
    callback=require_matplotlib,
    help="Write charts of acceptance lengths, acceptance and speed to this file, as SVG.",
)
@json_flag
def eval_drafter(
    prompts_file: Path,
    suites: tuple[str, ...],
    num_prompts: int | None,
    output: Path | None,
    card: Path | None,
    plot: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure a drafter on PROMPTS_FILE, in this process.

    PROMPTS_FILE is a JSON lines file: strings, or objects with "prompt" or "turns", and "suite".
    The engine is that of specdec serve. It answers each prompt with drafts and without, one at a
    time.
    """
    from specdec.training.card import read_card, write_evaluation
    from specdec.training.data.prompts import read_prompts, select_prompts

    if card is not None:
        read_card(card)  # before minutes of measurements
    prompts = select_prompts(read_prompts(prompts_file), suites, num_prompts)
    config = _engine_config({name: flags.pop(name) for name in _ENGINE_SETTINGS})
    results = _measure(prompts, config, flags)
    report = {
        "engine": config.to_mapping(),
        "evaluation": flags | {"prompts_file": str(prompts_file)},
        "results": [asdict(each) for each in results],
    }
    if output is not None:
        output.write_text(json.dumps(report) + "\n", encoding="utf-8")
    if card is not None:
        settings = flags | {"prompts_file": prompts_file.name, "num_prompts": len(prompts)}
        write_evaluation(card, config, settings, results)
    if plot is not None:
        plot.write_text(draw_charts(_charts(results)), encoding="utf-8")
    show_result(report, _table(results), as_json)


def _engine_config(flags: Mapping[str, Any]) -> LLMConfig:
    """Return the configuration of the engine by the flags that are given."""
    from specdec.engine.models.model_detection import with_detected_models
    from specdec.llm.drafter_choice import with_fastest_drafter

    given = {name: value for name, value in flags.items() if value is not None}
    config = LLMConfig.from_mapping({**given, "max_num_seqs": _MAX_NUM_SEQS})
    return with_fastest_drafter(with_detected_models(config, print_stderr), print_stderr)


def _measure(
    prompts: Sequence[PromptRecord], config: LLMConfig, flags: Mapping[str, Any]
) -> list[SuiteResult]:
    """Load the models, measure, and print warnings. flags: the fields of EvaluationConfig."""
    from specdec.llm import LLM
    from specdec.models.resolve import resolve
    from specdec.text.tokenizer import Tokenizer
    from specdec.training.evaluation import DrafterEvaluation, EvaluationConfig

    evaluation = EvaluationConfig(**flags)
    tokenizer = Tokenizer(resolve(config.model))
    total = len(prompts) * len(evaluation.temperatures)
    with LLM(**config.to_mapping()) as llm, progress_bar(total, "prompt") as advance:
        results = DrafterEvaluation(llm, tokenizer, evaluation).run(prompts, advance)
    for line in _warnings(results):
        print_stderr(line)
    return results


_HEADING = (
    *("suite", "temperature", "length", "acceptance", "tokens/s", "without", "speed-up", "other"),
    "acceptance by position",
)


def _table(results: Sequence[SuiteResult]) -> str:
    rows = [_HEADING, *map(_cells, results)]
    return "\n".join(aligned(rows, numbers=range(1, len(_HEADING) - 1)))


def _cells(result: SuiteResult) -> tuple[str, ...]:
    return (
        result.suite or "-",
        f"{result.temperature:g}",
        f"{result.mean_accepted_length:.2f}",
        f"{result.acceptance_rate:.0%}",
        shown_number(result.tokens_per_s, 1),
        shown_number(result.baseline_tokens_per_s, 1),
        shown_number(result.speedup, 2),
        str(result.num_other_answers),
        " ".join(f"{rate:.0%}" for rate in result.acceptance_by_position),
    )


def _warnings(results: Sequence[SuiteResult]) -> list[str]:
    """Return a line for each suite and temperature with a speed-up below 1."""
    return [
        f"warning: {each.suite or 'prompts'} at temperature {each.temperature:g} is slower with "
        f"drafts than without (speed-up {each.speedup:.2f}): draft fewer tokens, train the drafter "
        "on more text of that kind, or choose another one"
        for each in results
        if each.speedup is not None and round(each.speedup, 2) < 1.0
    ]


def _charts(results: Sequence[SuiteResult]) -> list[LineChart | BarChart]:
    """Return three charts: acceptance lengths, acceptance by position, and tokens per second."""
    num_positions = max(len(each.acceptance_by_position) for each in results)
    lengths: dict[str, dict[str, float]] = {}
    rates: dict[str, dict[str, float]] = {}
    positions: dict[str, list[float]] = {}
    for each in results:
        suite, temperature = each.suite or "prompts", f"temperature {each.temperature:g}"
        lengths.setdefault(suite, {})[temperature] = each.mean_accepted_length
        rates.setdefault(suite, {})[f"{temperature}, drafts"] = each.tokens_per_s or 0.0
        rates[suite][f"{temperature}, none"] = each.baseline_tokens_per_s or 0.0
        shares = each.acceptance_by_position
        padding = [float("nan")] * (num_positions - len(shares))
        positions[f"{suite}, {temperature}"] = [*shares, *padding]
    places = range(1, num_positions + 1)
    return [
        BarChart("Acceptance length: tokens of a step with a draft", lengths),
        LineChart("Drafts accepted up to a position", "position", places, positions),
        BarChart("Tokens per second, one request at a time", rates),
    ]
