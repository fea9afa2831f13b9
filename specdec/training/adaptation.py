"""New versions of a served head, trained on what the target has answered lately.

A version begins with the weights of the head in use, and exists only if it accepts more of the
held-out answers than that head, beyond chance. Tokens of the answers that the head could not draft
replace draft tokens that do not occur in them. Samples are in memory only; files hold weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specdec.training.acceptance import is_longer
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import DRAW_LIMIT, Sample
from specdec.training.data.draft_vocabulary import ReducedVocabulary, special_tokens, token_counts
from specdec.training.data.target_cache import CachedTarget
from specdec.training.trainer import Data, Evaluation, Progress, Trainer
from specdec.training.warm_start import ExportedHead

_WORK = ".training"
"""Folder of the run of a version."""


@dataclass(frozen=True)
class Version:
    """Outcome of a training run. before, after: acceptance length on its held-out samples.

    directory: of the exported head; None where it was not better beyond chance.
    """

    directory: Path | None
    before: float
    after: float
    num_samples: int


class TooFewTokensError(Exception):
    """Fewer answer tokens are held out than a version needs."""


class Adaptation:
    """Makes versions of heads of one target, each in a directory of `output`."""

    def __init__(
        self, target: CachedTarget, config: TrainingConfig, output: Path, min_held_out_tokens: int
    ) -> None:
        """config: of every run; what the head's files determine of it is replaced.

        min_held_out_tokens: of held-out answers, below which no version is trained; for these,
        more than the configured number of samples are evaluated.
        """
        self._target = target
        self._min_held_out_tokens = min_held_out_tokens
        self._config = config
        self._output = output

    def train(
        self, head: Path, samples: Sequence[Sample], report: Callable[[Progress], None]
    ) -> Version:
        """Train the head in a directory further.

        Raises UnsupportedModelError for a head that was not exported by training, and
        TooFewTokensError.
        """
        exported = ExportedHead(head)
        config = replace(self._config, **exported.settings)
        train, held_out = split(samples, config.held_out, config.seed)
        held_out = self._latest(held_out, config.max_held_out_samples)
        self._target.keep_only(samples)
        card = {"continues": str(head), "num_trained_samples": len(train)}
        card |= {"num_evaluated_samples": len(held_out)}
        token_ids = exported.token_ids(self._target.config.vocab_size)
        data = Data(train, held_out, token_ids, card, is_sampled=True)
        shutil.rmtree(self._output / _WORK, ignore_errors=True)
        try:
            trainer = self._trainer(config, data, exported)
            before, renewed = _best(trainer), self._renewed(data)
            if renewed.token_ids != data.token_ids:
                trainer = self._trainer(config, renewed, exported, before)
            trainer.run(report)
            after = _best(trainer)
            is_better = is_longer(before.by_sample, after.by_sample)
            directory = self._publish(trainer) if is_better else None
            return Version(directory, before.mean_length, after.mean_length, len(samples))
        finally:
            shutil.rmtree(self._output / _WORK, ignore_errors=True)

    def _latest(self, held_out: Sequence[Sample], limit: int) -> list[Sample]:
        """Return the latest `limit` samples, or as many as have the minimum of answer tokens."""
        found, num_tokens = list[Sample](), 0
        for each in reversed(held_out):
            if len(found) >= limit and num_tokens >= self._min_held_out_tokens:
                break
            if len(each.answer) > 1:
                found.append(each)
                num_tokens += len(each.answer)
        if num_tokens < self._min_held_out_tokens:
            minimum = f"minimum {self._min_held_out_tokens}"
            raise TooFewTokensError(f"{num_tokens} answer tokens are held out ({minimum})")
        return found[::-1]

    def _trainer(
        self,
        config: TrainingConfig,
        data: Data,
        start: ExportedHead,
        before: Evaluation | None = None,
    ) -> Trainer:
        directory = self._output / _WORK
        return Trainer(config, self._target, data, directory, start=start, before=before)

    def _renewed(self, data: Data) -> Data:
        """Return the data with the draft tokens for a version that is trained on it.

        New ones take the columns of noise of those that they replace.
        """
        counts = token_counts(data.train, self._target.config.vocab_size)
        special = special_tokens(self._target.directory)
        vocabulary = ReducedVocabulary(np.array(data.token_ids)).renewed(counts, special)
        token_ids = vocabulary.token_ids.tolist()
        own = {token_id: column for column, token_id in enumerate(data.token_ids)}
        kept = [own.pop(each, None) for each in token_ids]
        free = iter(own.values())
        columns = [next(free) if column is None else column for column in kept]
        return replace(data, token_ids=token_ids, columns=columns)

    def _publish(self, trainer: Trainer) -> Path:
        """Move the exported head to a new directory, which appears whole."""
        numbers = (int(path.name.rpartition("-")[2]) for path in self._output.glob("version-*"))
        directory = self._output / f"version-{max(numbers, default=0) + 1:05}"
        trainer.head_directory.rename(directory)
        return directory


def _best(trainer: Trainer) -> Evaluation:
    assert trainer.best_evaluation is not None, "it began with a head"
    return trainer.best_evaluation


def split(
    samples: Sequence[Sample], held_out: float, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to train on, and those of a random share `held_out` of the prompts.

    The side of a prompt follows from it and the seed, so that it keeps its side while samples come
    and go: no version is measured on prompts that an earlier one was trained on. The exception is a
    set of few prompts: of two or more at least one is on each side, and a single one is not held
    out.
    """
    draws = {each.prompt: each.draw(seed) for each in samples}
    limit = 0.0
    if len(draws) > 1:
        lowest, *_, highest = sorted(draws.values())
        limit = min(max(held_out * DRAW_LIMIT, lowest + 1), highest)
    sides: tuple[list[Sample], list[Sample]] = [], []
    for each in samples:
        sides[draws[each.prompt] < limit].append(each)
    return sides
