"""`specdec train`: makes a target's own answers, and trains a drafter for it on them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from cluster.cli.output import (
    Flag,
    SectionedCommand,
    combine_flags,
    default_flag,
    json_flag,
    print_stderr,
    section_flag,
    show_result,
)
from cluster.cli.training.train_data import corpus_flags, make_corpus
from specdec.config.engine import Kernels
from specdec.config.quantization import CPU_QUANTIZATION_METHODS, QuantizationMethod
from specdec.models.heads.formats.dflash import MarkovKind
from specdec.training.atomic_files import sole_writer
from specdec.training.data.config import (
    ExportLayout,
    LossName,
    OptimizerName,
    PositionWeights,
    Precision,
    TrainingConfig,
    WeightDtype,
)
from specdec.types.errors import InvalidValueError

if TYPE_CHECKING:
    import torch

    from specdec.training.trainer import Evaluation, Progress, Trainer

DEFAULT_LORA_RANK = 16
"""The largest rank that a service loads by default."""
_LOG_INTERVAL_S = 30.0
_SHORT_LENGTH = 2.0
"""A head with 1.83 was slower than no drafts on a CPU (docs/training.md)."""
_CLEAR_LINE = "\r\x1b[K"
_CHOICES = {
    "loss": LossName,
    "position_weights": PositionWeights,
    "optimizer": OptimizerName,
    "precision": Precision,
    "markov_head": MarkovKind,
    "export_dtype": WeightDtype,
    "export_layout": ExportLayout,
}
_TEXTS = {
    "Drafter": {
        "method": "Drafting method: eagle3, dspark, dflash, medusa, mlp_speculator or draft_model.",
        "depth": "Draft tokens after each position that are trained.",
        "num_layers": "Decoder layers.  [default: 2 of dspark and dflash, 3 of draft_model]",
        "markov_rank": "Rank of the Markov head of dspark.  [default: 64]",
        "markov_head": "Kind of the Markov head of dspark.  [default: vanilla]",
        "lora_rank": "Rank of an adapter of the head in --start, which is trained instead of the "
        "head.  [default: 16 with --adapter]",
        "export_dtype": "Data type of the exported weights.",
        "export_layout": "Packed is small: matrices in int8, without what the target has.",
    },
    "Training": {
        "num_epochs": "Passes over the samples, unless it ends earlier.",
        "batch_tokens": "Tokens of prompts and answers in a step.",
        "max_anchors": "Positions of a sample after which a step drafts, drawn at random.",
        "optimizer": "Muon is used for hidden matrices, with AdamW for the rest.",
        "learning_rate": "Peak learning rate.",
        "warmup": "Share of the steps in which the learning rate grows.",
        "weight_decay": "Decoupled weight decay of matrices.",
        "clip_norm": "Largest norm of the gradient.",
        "loss": "Loss of a draft token against the target's distribution.",
        "position_weights": "Weights of the places in a draft.",
        "decay": "Factor from one place in a draft to the next, with decayed weights.",
        "precision": "Of the drafter's matrix products.",
        "seed": "Of the answers, the initial weights, the order and the held-out samples.",
    },
    "Evaluation": {
        "held_out": "Share of the samples to evaluate on.",
        "max_held_out_samples": "Limit of their number.",
        "evaluate_every": "Steps between evaluations.",
        "patience": "Evaluations without a longer acceptance length after which training ends.",
        "checkpoint_every": "Steps between checkpoints.",
    },
}


def _config_flags() -> Flag:
    """Return a flag for each field of TrainingConfig."""
    defaults = {each.name: each.default for each in fields(TrainingConfig)}
    flags = []
    for section, texts in _TEXTS.items():
        for name, text in texts.items():
            default = defaults[name]
            choices = _CHOICES.get(name)
            kind = click.Choice(get_args(choices)) if choices else type(default or 0)
            flag = f"--{name.replace('_', '-')}"
            flags.append(
                section_flag(
                    section, flag, type=kind, default=default, show_default=True, help=text
                )
            )
    return combine_flags(*flags)


target_precision_flags = combine_flags(
    click.option(
        "--dtype",
        type=click.Choice(get_args(WeightDtype)),
        help="Data type of the target, as it is served.  "
        "[default: float32 on a CPU, bfloat16 on a GPU]",
    ),
    click.option(
        "--quantization",
        type=click.Choice(CPU_QUANTIZATION_METHODS),
        help="Quantization of the target, as it is served.",
    ),
)
"""Flags of the target that a drafter is trained for."""


@click.command(cls=SectionedCommand, short_help="Train a drafter for a model.")
@click.argument("model")
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
@corpus_flags
@section_flag(
    "Corpus",
    "--corpus",
    "corpora",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of specdec train-data, to train on it instead of making OUTPUT/corpus; may be "
    "repeated.",
)
@section_flag(
    "Corpus", "--num-samples", type=click.IntRange(min=2), help="Use only the first N samples."
)
@click.option(
    "--start",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of an exported head of the same method, to train it or an adapter of it.",
)
@click.option(
    "--adapter",
    help="LoRA adapter of MODEL, a directory or a Hub id, with which it answers. An adapter of the "
    "head in --start is trained, to be loaded with it.",
)
@click.option(
    "--draft-vocab-size",
    type=click.IntRange(min=1),
    help="Tokens that can be drafted, the most frequent ones.  [default: 8192]",
)
@target_precision_flags
@default_flag(
    "--device",
    default="cpu",
    help="Device that trains: auto, cpu, cuda, or cuda:N for one of several GPUs; auto uses cuda "
    "if torch finds a GPU.",
)
@default_flag(
    "--kernels",
    type=click.Choice(get_args(Kernels)),
    default="auto",
    help="Kernels with which the target runs, as when it is served.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]")
@_config_flags()
@json_flag
def train(
    model: str,
    output: Path,
    corpora: tuple[Path, ...],
    num_samples: int | None,
    start: Path | None,
    adapter: str | None,
    draft_vocab_size: int | None,
    dtype: WeightDtype | None,
    quantization: QuantizationMethod | None,
    device: str,
    kernels: Kernels,
    threads: int | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Train a drafter for MODEL on its own answers.

    MODEL first answers the prompts of a file, or prompts that it writes itself. The best drafter so
    far is in OUTPUT/head, for --speculative-config; an adapter in OUTPUT/adapter, for specdec lora
    load --draft-path. A run that was interrupted continues when the same command is started again.
    """
    from specdec.models.resolve import resolve, resolve_adapter
    from specdec.training.data.target import TargetPrecision
    from specdec.training.device import training_device, use_device
    from specdec.training.run import TrainingFiles, open_run, require_trainable

    _set_threads(threads)
    of_target = None if adapter is None else resolve_adapter(adapter, print_stderr)
    trains_on, config = training_device(device), _config(settings, has_adapter=adapter is not None)
    precision = TargetPrecision.on(trains_on, dtype, quantization, kernels)
    require_trainable(config, start, draft_vocab_size, resolve(model, progress=print_stderr))
    _refuse_flags_of_answers(settings, corpora)
    settings |= precision.as_settings() | {"seed": config.seed, "adapter": str(of_target or "")}
    with sole_writer(output / ".run.lock", "trains in"):
        corpora = corpora or (_corpus(model, output, trains_on, settings),)
        use_device(trains_on)
        files = TrainingFiles(model, corpora, output, num_samples, start, of_target)
        trainer = open_run(files, config, precision, draft_vocab_size, print_stderr, trains_on)
        _run(trainer, as_json=as_json)


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _run(trainer: Trainer, *, as_json: bool) -> None:
    if trainer.step:
        print_stderr(f"continuing after step {trainer.step} of {trainer.num_steps}")
    trainer.run(Reporter(time.monotonic, print_stderr))
    _show_result(trainer, as_json=as_json)


def _warn_of_short_drafts(trainer: Trainer) -> None:
    if trainer.best < _SHORT_LENGTH:
        print_stderr(
            f"warning: the held-out acceptance length is {trainer.best:.2f}; below "
            f"{_SHORT_LENGTH:g} a head may be slower than no drafts: measure it with "
            "specdec eval-drafter, or train on more answers"
        )


def _show_result(trainer: Trainer, *, as_json: bool) -> None:
    _warn_of_short_drafts(trainer)
    directory = trainer.head_directory
    state = {"step": trainer.step, "best_accepted_length": trainer.best}
    show_result({directory.name: str(directory), **state}, directory, as_json)


def _config(settings: dict[str, Any], *, has_adapter: bool) -> TrainingConfig:
    """Remove the fields of TrainingConfig from the flags. Raises InvalidValueError.

    has_adapter: whether an adapter is trained by default.
    """
    from specdec.training.drafters.base import drafter_class

    if has_adapter and settings["lora_rank"] is None:
        settings["lora_rank"] = DEFAULT_LORA_RANK
    config = TrainingConfig(
        **{each.name: settings.pop(each.name) for each in fields(TrainingConfig)}
    )
    drafter_class(config.method)  # before an hour of answers
    return config


def _corpus(model: str, output: Path, device: torch.device, flags: Mapping[str, Any]) -> Path:
    """Make the corpus of a run that has no checkpoint yet; return its directory.

    device: that answers. flags: the other fields of GenerationConfig. A run is tied to its samples,
    so the corpus does not change after the first checkpoint. Raises InvalidValueError for a GPU
    with a number.
    """
    from specdec.training.checkpoint import Checkpoint

    directory = output / "corpus"
    if Checkpoint.exists(output):
        return directory
    if device.index:
        limit = "cuda without --corpus; CUDA_VISIBLE_DEVICES selects the GPU that answers"
        raise InvalidValueError("device", str(device), limit)
    make_corpus(model, directory, **{**flags, "device": device.type})
    return directory


def _refuse_flags_of_answers(flags: Mapping[str, Any], corpora: Sequence[Path]) -> None:
    """Reject flags of answers that a given corpus has already. Raises InvalidValueError."""
    if not corpora:
        return
    context = click.get_current_context()
    for name, value in flags.items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise InvalidValueError(name, value, "left out with --corpus, which has the answers")


class Reporter:
    """Prints the progress of a run: in place on a terminal, else a line each half minute."""

    def __init__(self, clock: Callable[[], float], show: Callable[[str], None]) -> None:
        self._clock, self._show = clock, show
        self._last = clock()
        self._evaluation: Evaluation | None = None

    def __call__(self, progress: Progress) -> None:
        """Print the progress if it is time to, or if there is a new evaluation."""
        is_new = progress.evaluation is not self._evaluation
        is_last = progress.step == progress.num_steps
        is_terminal = sys.stderr.isatty()
        interval = 1.0 if is_terminal else _LOG_INTERVAL_S
        if not (is_new or is_last) and self._clock() - self._last < interval:
            return
        self._last, self._evaluation = self._clock(), progress.evaluation
        if is_terminal:
            click.echo(_CLEAR_LINE, err=True, nl=False)
            if not is_new:
                click.echo(progress_line(progress), err=True, nl=is_last)
                return
        self._show(progress_line(progress))
        if is_new and progress.evaluation is not None:
            for line in evaluation_lines(progress.evaluation):
                self._show(line)


def progress_line(progress: Progress) -> str:
    """Return step, loss, speed and time left in a line."""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    line = (
        f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.3f}  "
        f"{progress.tokens_per_second:.0f} tokens/s  {hours}:{minutes:02}:{seconds:02} left"
    )
    if progress.evaluation is not None:
        line += f"  acceptance length {progress.evaluation.mean_length:.2f}"
    return line


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """Return the held-out acceptance, a line for each temperature."""
    return [
        f"  held out, temperature {temperature:g}: acceptance length {each.mean_length:.2f}, "
        f"by position {' '.join(f'{share:.2f}' for share in each.by_position)}"
        for temperature, each in evaluation.acceptance.items()
    ]
