"""`specdec train-data`: makes a corpus of a target's own answers, for training a drafter."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.output import (
    combine_flags,
    counted,
    default_flag,
    json_flag,
    print_stderr,
    section_flag,
    show_result,
)
from cluster.cli.parameter_types import EXISTING_FILE, ListOf
from specdec.config.llm import LLMConfig
from specdec.config.quantization import CPU_QUANTIZATION_METHODS

if TYPE_CHECKING:
    from specdec.training.data.generation import Progress

DEFAULT_NUM_SELF_WRITTEN = 4000
"""Prompts of a corpus without a prompts file: about half a million answer tokens."""
_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_corpus_flag = partial(section_flag, "Corpus")


def _choice(setting: str) -> click.Choice[str]:
    return click.Choice(LLMConfig.settings()[setting].limit.options)


corpus_flags = combine_flags(
    _corpus_flag("--prompts", type=EXISTING_FILE, help="JSON lines file with prompts to answer."),
    _corpus_flag(
        "--answers-per-prompt",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        help="Number of answers to each prompt of the file.",
    ),
    _corpus_flag(
        "--num-self-written",
        type=click.IntRange(min=0),
        help="Number of prompts that the model writes itself, and answers.  "
        f"[default: {DEFAULT_NUM_SELF_WRITTEN} without --prompts, else 0]",
    ),
    _corpus_flag(
        "--prompt-prefixes",
        type=EXISTING_FILE,
        help="JSON lines file with first words of prompts that the model writes itself, to steer "
        "them.",
    ),
    _corpus_flag(
        "--temperatures",
        type=ListOf("NUMBER,...", float),
        default="0,0.3,0.7,1",
        show_default=True,
        help="Sampling temperatures, separated by commas; each answer draws one of them.",
    ),
    _corpus_flag(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        default=192,
        show_default=True,
        help="Maximum number of tokens of an answer.",
    ),
    _corpus_flag(
        "--max-num-seqs",
        type=click.IntRange(min=1),
        help="Number of conversations in a batch.  [default: 64 on a CPU, 256 on a GPU]",
    ),
)
"""Flags of a corpus's contents: fields of GenerationConfig, and the prompts file."""

_precision_flags = combine_flags(
    click.option(
        "--dtype",
        type=_choice("dtype"),
        help="Data type that answers.  [default: float32 on a CPU, bfloat16 on a GPU]",
    ),
    default_flag(
        "--quantization",
        type=click.Choice(("none", *CPU_QUANTIZATION_METHODS)),
        default="none",
        help="Quantization that answers.",
    ),
    default_flag(
        "--device",
        type=_choice("device"),
        default="cpu",
        help="Device that answers; auto uses cuda if torch finds a GPU.",
    ),
    default_flag(
        "--kernels",
        type=_choice("kernels"),
        default="auto",
        help="Kernels with which the target generates the answers.",
    ),
    default_flag("--seed", type=click.IntRange(min=0), default=0, help="Random seed."),
)
"""The other fields of GenerationConfig."""


@click.command("train-data", short_help="Make a corpus of a model's own answers for training.")
@click.argument("model")
@click.argument("directory", type=_DIRECTORY)
@corpus_flags
@click.option("--adapter", help="LoRA adapter of MODEL, a directory or a Hub id, that answers.")
@_precision_flags
@json_flag
def train_data(
    model: str, directory: Path, adapter: str | None, as_json: bool, **flags: Any
) -> None:
    """Make a corpus of MODEL's own answers in DIRECTORY, for training a drafter.

    The prompts come from a JSON lines file (strings, or objects with "prompt" or "turns"), or MODEL
    writes them. A run that was interrupted continues when the same command is started again, and
    extends the corpus with more answers or self-written prompts.
    """
    from specdec.models.resolve import resolve_adapter

    if adapter is not None:
        flags["adapter"] = str(resolve_adapter(adapter, print_stderr))
    progress = make_corpus(model, directory, **flags)
    names = ("num_samples", "num_answer_tokens", "num_skipped")
    counts = {name: getattr(progress, name) for name in names}
    show_result({"corpus": str(directory), **counts}, directory, as_json)


def make_corpus(
    model: str,
    directory: Path,
    *,
    prompts: Path | None,
    num_self_written: int | None,
    prompt_prefixes: Path | None,
    **flags: Any,
) -> Progress:
    """Generate the samples that a directory lacks; flags: further fields of GenerationConfig.

    num_self_written: None for the default, which depends on whether there are prompts. Raises as
    `generate_corpus`, `read_prompts` and `read_prefixes` do.
    """
    from specdec.training.data.generation import GenerationConfig, generate_corpus
    from specdec.training.data.prompts import read_prefixes, read_prompts

    if num_self_written is None:
        num_self_written = DEFAULT_NUM_SELF_WRITTEN if prompts is None else 0
    prefixes = read_prefixes(prompt_prefixes) if prompt_prefixes is not None else ()
    config = GenerationConfig(
        model, num_self_written=num_self_written, prompt_prefixes=prefixes, **flags
    )
    records = read_prompts(prompts) if prompts is not None else []
    with _interrupted_by_sigterm():
        progress = generate_corpus(config, records, directory)
    print_stderr(
        f"{counted(progress.num_samples, 'new sample')} with "
        f"{counted(progress.num_answer_tokens, 'answer token')}; "
        f"{counted(progress.num_skipped, 'request')} without one"
    )
    return progress


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Stop at SIGTERM as at Ctrl-C, which stores the finished samples; exit with its own code.

    SIGINT, too: a shell starts background jobs with SIGINT ignored.
    """
    is_terminated = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal is_terminated
        is_terminated = True
        signal.default_int_handler(number, frame)

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    except KeyboardInterrupt:
        if is_terminated:
            click.get_current_context().exit(128 + signal.SIGTERM)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
