"""`specdec adapt`: trains the draft head of a running service further on what it answers."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from grpc import StatusCode

from cluster.cli.options import admin_client, admin_flags
from cluster.cli.output import counted, default_flag, print_stderr
from cluster.cli.training.idle_time import run_when_idle
from cluster.cli.training.train import target_precision_flags
from specdec.client import AdminClient, ClientError, DrafterOrder
from specdec.config.quantization import QuantizationMethod
from specdec.training.atomic_files import sole_writer
from specdec.training.data.config import Precision, TrainingConfig, WeightDtype
from specdec.types.drafters import VersionState
from specdec.types.errors import InvalidValueError, NotReadyError

if TYPE_CHECKING:
    from specdec.training.adaptation import Adaptation, Version
    from specdec.training.data.corpus import Sample

_LONGEST_SAMPLE = 8192
"""Longer samples are skipped: the trainer's target would need memory for them."""

_CACHE_BYTES = 2**30
"""Memory of the target's hidden states that are kept."""
_AT_THE_END_ALONE = 2**31 - 1
"""Steps between two evaluations, of which one takes as long as ten steps or more."""
_MIN_HELD_OUT_TOKENS = 512
"""Tokens of held-out answers, below which no version is trained."""

_TEMPORARY = (
    StatusCode.UNAVAILABLE,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.RESOURCE_EXHAUSTED,
)
"""Codes of calls that are sent again: a replica restarts, or loads another version."""


@click.command(short_help="Train the draft head of a running service on its answers.")
@click.argument("target")
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
@default_flag(
    "--min-tokens",
    type=click.IntRange(min=1),
    default=10_000,
    help="Tokens of new samples before a version is trained.",
)
@default_flag(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=40_000,
    help="Tokens of the latest samples to train on, those of earlier versions included.",
)
@click.option(
    "--num-versions", type=click.IntRange(min=1), help="End after N runs. Default: no limit."
)
@default_flag(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 3600),
    default=10.0,
    help="Seconds between two requests for samples.",
)
@default_flag("--learning-rate", type=float, default=5e-4, help="Peak learning rate.")
@default_flag(
    "--num-epochs", type=click.IntRange(min=1), default=4, help="Passes over the samples."
)
@default_flag(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="float32",
    help="Precision of the drafter's matrix products.",
)
@target_precision_flags
@default_flag("--threads", type=click.IntRange(min=1), default=1, help="CPU threads.")
@admin_flags
def adapt(
    target: str,
    output: Path,
    min_tokens: int,
    max_tokens: int,
    num_versions: int | None,
    interval_s: float,
    learning_rate: float,
    num_epochs: int,
    precision: Precision,
    dtype: WeightDtype | None,
    quantization: QuantizationMethod | None,
    threads: int,
    **connection: Any,
) -> None:
    """Train the draft head of the service further, and load each version that is better.

    TARGET is the served model. Samples are from requests with allow_training, if the service has
    --training-buffer-tokens. Its nodes must see the versions in OUTPUT under the same path.
    """
    run_when_idle(threads)  # before a thread begins

    import torch

    from specdec.models.resolve import resolve
    from specdec.models.weights.checkpoint import CPU
    from specdec.training.adaptation import Adaptation
    from specdec.training.data.target import TargetPrecision
    from specdec.training.data.target_cache import CachedTarget

    torch.set_num_threads(threads)
    directory = resolve(target, progress=print_stderr)
    longest = _longest_sample(directory)
    target_precision = TargetPrecision.on(CPU, dtype, quantization)
    with admin_client(**connection) as client, sole_writer(output / ".run.lock", "trains in"):
        source = SampleSource(client, min_tokens, max_tokens, longest)
        teacher = CachedTarget(directory, longest, target_precision, _CACHE_BYTES)
        config = _training_config(learning_rate, num_epochs, precision)
        adaptation = Adaptation(teacher, config, output.resolve(), _MIN_HELD_OUT_TOKENS)
        AdaptationLoop(client, source, adaptation).run(num_versions, lambda: time.sleep(interval_s))


def _longest_sample(directory: Path) -> int:
    from specdec.models.config.model_config import ModelConfig

    return min(_LONGEST_SAMPLE, ModelConfig.from_directory(directory).max_position_embeddings)


def _training_config(learning_rate: float, num_epochs: int, precision: Precision) -> TrainingConfig:
    return TrainingConfig(
        learning_rate=learning_rate,
        num_epochs=num_epochs,
        precision=precision,
        batch_tokens=512,
        held_out=0.15,
        max_held_out_samples=32,
        evaluate_every=_AT_THE_END_ALONE,
    )


class SampleSource:
    """The latest samples of a service, in memory."""

    def __init__(
        self, client: AdminClient, min_tokens: int, max_tokens: int, longest: int = _LONGEST_SAMPLE
    ) -> None:
        """Start empty. longest: tokens of a sample; longer ones are skipped.

        Raises InvalidValueError where the latest `max_tokens` are never enough.
        """
        if min_tokens > max_tokens:
            raise InvalidValueError("min_tokens", min_tokens, f"at most max_tokens ({max_tokens})")
        self._client = client
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._longest = longest
        self._samples: deque[Sample] = deque()
        self._num_tokens = self._num_new_tokens = 0  # new ones since `mark_used`
        self._num_wanted = min_tokens

    def read(self) -> bool:
        """Take what the replicas have; return whether that is enough for a version."""
        from specdec.training.data.corpus import Sample

        is_more = True
        while is_more:
            batches = self._client.take_samples()
            taken = [each for batch in batches for each in batch.samples]
            self._add(
                Sample(each.token_ids, each.num_prompt_tokens, each.temperature)
                for each in taken
                if len(each.token_ids) <= self._longest
            )
            is_more = any(batch.num_left_tokens for batch in batches)
        num_prompts = len({each.prompt for each in self._samples})
        return self._num_new_tokens >= self._num_wanted and num_prompts > 1

    def _add(self, samples: Iterable[Sample]) -> None:
        for each in samples:
            self._samples.append(each)
            self._num_tokens += len(each.token_ids)
            self._num_new_tokens += len(each.token_ids)
        while self._num_tokens > self._max_tokens and len(self._samples) > 1:
            self._num_tokens -= len(self._samples.popleft().token_ids)

    def mark_used(self) -> list[Sample]:
        """Return all samples; further ones count as new."""
        self._num_new_tokens, self._num_wanted = 0, self._min_tokens
        return list(self._samples)

    def mark_too_few(self) -> None:
        """Let a tenth of the new tokens be enough next, since too few answers were held out."""
        self._num_wanted = math.ceil(self._min_tokens / 10)


class AdaptationLoop:
    """Trains a version whenever there are enough samples, and has the service load it."""

    def __init__(self, client: AdminClient, source: SampleSource, adaptation: Adaptation) -> None:
        self._client = client
        self._source = source
        self._adaptation = adaptation
        self._version: Version | None = None  # trained, and not yet loaded

    def run(self, num_versions: int | None, wait: Callable[[], None]) -> None:
        """Train `num_versions` times, or indefinitely.

        wait: called while samples are missing, and after a call that failed for a while. Samples
        and a trained version are kept meanwhile. Raises ClientError for other failures.
        """
        num_trained = 0
        while num_versions is None or num_trained < num_versions:
            try:
                is_trained = self._advance()
            except ClientError as error:
                if error.code not in _TEMPORARY:
                    raise
                print_stderr(f"{error.message}; trying again")
                is_trained = False
            num_trained += is_trained
            if not is_trained:
                wait()

    def _advance(self) -> bool:
        """Train a version and have it loaded; return whether there were enough samples."""
        from specdec.training.adaptation import TooFewTokensError

        if self._version is None:
            if not self._source.read():
                return False
            head = self._active_head()
            samples = self._source.mark_used()
            try:
                self._version = self._adaptation.train(head, samples, lambda progress: None)
            except TooFewTokensError as error:
                hint = "waiting for more; a larger --max-tokens helps"
                print_stderr(f"{counted(len(samples), 'sample')}: {error}; {hint}")
                self._source.mark_too_few()
                return False
            print_stderr(_summary(self._version))
        if self._version.directory is not None:
            self._load(self._version.directory)
        self._version = None
        return True

    def _load(self, directory: Path) -> None:
        """Have the replicas load a version, unless one is pinned or an earlier order arrived."""
        reports = self._client.drafters()
        if any(report.is_pinned for report in reports):
            return
        known = {version.name for report in reports for version in report.versions}
        if str(directory) not in known:
            for report in self._client.set_drafter(DrafterOrder(path=str(directory))):
                if report.fault:
                    print_stderr(f"replica {report.replica_id}: {report.fault}")
        click.echo(directory)

    def _active_head(self) -> Path:
        """Return the directory of the version in use on the first replica that has one."""
        from specdec.models.resolve import resolve

        for report in self._client.drafters():
            for version in report.versions:
                if version.state is VersionState.ACTIVE:
                    return resolve(version.name, progress=print_stderr)
        raise NotReadyError("no replica has a draft head")


def _summary(version: Version) -> str:
    outcome = "not better beyond chance" if version.directory is None else str(version.directory)
    return (
        f"{counted(version.num_samples, 'sample')}: held-out acceptance length "
        f"{version.before:.2f} before, {version.after:.2f} after: {outcome}"
    )
