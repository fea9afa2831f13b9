"""`specdec train-data`: makes a corpus of a target's own answers, for training a drafter."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from cluster.cli.bench.load_flags import ListOf
from cluster.cli.output import combine_flags, json_flag, print_stderr, show_json
from specdec.config.llm import LLMConfig

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_DIRECTORY = click.Path(file_okay=False, path_type=Path)


def _choice(setting: str) -> click.Choice[str]:
    return click.Choice(LLMConfig.settings()[setting].limit.options)


data_flags = combine_flags(
    click.option("--prompts", type=_FILE, help="JSON lines file with prompts to answer."),
    click.option(
        "--answers-per-prompt",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        help="Number of answers to each prompt of the file.",
    ),
    click.option(
        "--num-self-written",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Number of prompts that the model writes itself, and answers.",
    ),
    click.option(
        "--temperatures",
        type=ListOf("NUMBER,...", float),
        default="0,0.3,0.7,1",
        show_default=True,
        help="Sampling temperatures, separated by commas; each answer draws one of them.",
    ),
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        default=192,
        show_default=True,
        help="Maximum number of tokens of an answer.",
    ),
    click.option(
        "--max-num-seqs",
        type=click.IntRange(min=1),
        default=64,
        show_default=True,
        help="Number of conversations in a batch.",
    ),
    click.option(
        "--dtype",
        type=_choice("dtype"),
        default="float32",
        show_default=True,
        help="Data type that answers.",
    ),
    click.option(
        "--quantization",
        type=_choice("quantization"),
        default="none",
        show_default=True,
        help="Quantization that answers.",
    ),
    click.option(
        "--device",
        type=_choice("device"),
        default="cpu",
        show_default=True,
        help="Device that answers.",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Random seed."
    ),
)
"""The fields of GenerationConfig, and the prompts file."""


@click.command("train-data", short_help="Make a corpus of a model's own answers for training.")
@click.argument("model")
@click.argument("directory", type=_DIRECTORY)
@data_flags
@json_flag
def train_data(
    model: str, directory: Path, prompts: Path | None, as_json: bool, **flags: Any
) -> None:
    """Make a corpus of MODEL's own answers in DIRECTORY, for training a drafter.

    The prompts come from a JSON lines file (strings, or objects with "prompt" or "turns"), or MODEL
    writes them. A run that was interrupted continues when the same command is started again, and
    extends the corpus with more answers or self-written prompts.
    """
    from specdec.training.generation import GenerationConfig, generate_corpus
    from specdec.training.prompts import read_prompts

    config = GenerationConfig(model, **flags)
    records = read_prompts(prompts) if prompts is not None else []
    with _interrupted_by_sigterm():
        progress = generate_corpus(config, records, directory)
    if as_json:
        names = ("num_samples", "num_answer_tokens", "num_skipped")
        show_json({"corpus": str(directory), **{name: getattr(progress, name) for name in names}})
        return
    click.echo(directory)
    print_stderr(
        f"{progress.num_samples} new samples with {progress.num_answer_tokens} answer tokens; "
        f"{progress.num_skipped} requests without one"
    )


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Stop at SIGTERM as at Ctrl-C, which stores the finished samples.

    SIGINT, too: a shell starts background jobs with SIGINT ignored.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
