"""New versions of a served head, trained on what the target has answered lately.

A version begins with the weights of the head in use, and exists only if it accepts more of the
held-out answers than that head. Its samples are in memory only; files hold weights.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target
from specdec.training.trainer import Data, Progress, Trainer
from specdec.training.warm_start import ExportedHead


@dataclass(frozen=True)
class Version:
    """Outcome of a training run. before, after: acceptance length on its held-out samples.

    directory: of the exported head; None where it was not better.
    """

    directory: Path | None
    before: float
    after: float
    num_samples: int


class Adaptation:
    """Makes versions of heads of one target, each in a directory of `output`."""

    def __init__(self, target: Target, config: TrainingConfig, output: Path) -> None:
        """config: of every run; what the head's files determine of it is replaced."""
        self._target = target
        self._config = config
        self._output = output

    def train(
        self, head: Path, samples: Sequence[Sample], report: Callable[[Progress], None]
    ) -> Version:
        """Train the head in a directory further on samples of two different prompts or more.

        Raises UnsupportedModelError for a head that was not exported by training, and
        InvalidValueError where no sample can be held out.
        """
        exported = ExportedHead(head)
        config = replace(self._config, **exported.settings)
        train, held_out = split(samples, config.held_out, config.seed)
        vocab_size = self._target.config.vocab_size
        card = {"continues": str(head), "num_trained_samples": len(train)}
        data = Data(train, held_out, exported.token_ids(vocab_size), card)
        work = self._output / ".training"
        shutil.rmtree(work, ignore_errors=True)
        try:
            trainer = Trainer(config, self._target, data, work, start=exported)
            before = trainer.best
            trainer.run(report)
            directory = self._publish(trainer) if trainer.best > before else None
            return Version(directory, before, trainer.best, len(samples))
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _publish(self, trainer: Trainer) -> Path:
        """Move the exported head to a new directory, which appears whole."""
        numbers = (int(path.name.rpartition("-")[2]) for path in self._output.glob("version-*"))
        directory = self._output / f"version-{max(numbers, default=0) + 1:05}"
        trainer.head_directory.rename(directory)
        return directory


def split(
    samples: Sequence[Sample], held_out: float, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to train on, and those of a random share `held_out` of the prompts.

    The side of a prompt follows from it and the seed, so that it keeps its side while samples come
    and go: no version is measured on prompts that an earlier one was trained on. The exception is a
    set of few prompts: of two or more at least one is on each side, and a single one is not held
    out.
    """
    draws = {prompt: _draw(prompt, seed) for prompt in map(_prompt, samples)}
    limit = 0.0
    if len(draws) > 1:
        lowest, *_, highest = sorted(draws.values())
        limit = min(max(held_out * 2**64, lowest + 1), highest)
    sides: tuple[list[Sample], list[Sample]] = [], []
    for each in samples:
        sides[draws[_prompt(each)] < limit].append(each)
    return sides


def _prompt(sample: Sample) -> tuple[int, ...]:
    return sample.token_ids[: sample.num_prompt_tokens]


def _draw(prompt: tuple[int, ...], seed: int) -> int:
    """Return a number from 0 to 2**64 - 1."""
    key = seed.to_bytes(8, "little")
    content = np.array(prompt, np.int32).tobytes()
    digest = hashlib.blake2b(content, digest_size=8, person=b"split", salt=key).digest()
    return int.from_bytes(digest, "little")
