"""A training run from its files: a corpus, a target and the directory of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.models.config.model_config import ModelConfig
from specdec.models.lora.peft import AdapterFiles
from specdec.models.resolve import portable_name, resolve
from specdec.models.weights.checkpoint import CPU
from specdec.models.weights.fingerprint import model_fingerprint
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Corpus, CorpusError
from specdec.training.data.draft_vocabulary import (
    ReducedVocabulary,
    check_size,
    special_tokens,
    token_counts,
)
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.drafters.base import drafter_class
from specdec.training.trainer import Data, Trainer
from specdec.training.warm_start import ExportedHead
from specdec.types.errors import InvalidValueError

DEFAULT_DRAFT_VOCAB_SIZE = 8192


@dataclass(frozen=True)
class TrainingFiles:
    """Where a run reads and writes.

    model: the target; an alias, a directory or a Hub id. corpora: of its answers, one or more, see
    `specdec.training.data.corpus`. output: of checkpoints and the exported drafter.
    num_samples: the first ones of the only corpus, which may be growing; None for all it has now.
    start: directory of an exported head of the same method to train further, or of which to train
    an adapter; None for a new one. adapter: directory of one of the target, with which it answered.
    """

    model: str
    corpora: tuple[Path, ...]
    output: Path
    num_samples: int | None = None
    start: Path | None = None
    adapter: Path | None = None


def draft_vocabulary_size(config: TrainingConfig, wanted: int | None, directory: Path) -> int:
    """Return the number of draft tokens for the target in a directory.

    wanted: None for the default, at most the target's. Raises InvalidValueError for a size that the
    method, the target or the head of an adapter rules out, before there are samples.
    """
    method = config.method
    if wanted is not None and config.lora_rank is not None:
        limit = "left out: an adapter has the draft tokens of its head"
        raise InvalidValueError("draft_vocab_size", wanted, limit)
    vocab_size = ModelConfig.from_directory(directory).vocab_size
    if drafter_class(method).has_reduced_vocabulary:
        size = min(DEFAULT_DRAFT_VOCAB_SIZE, vocab_size) if wanted is None else wanted
        check_size(size, len(special_tokens(directory)), vocab_size)
        return size
    if wanted not in (None, vocab_size):
        limit = f"left out, or {vocab_size}, the target's: {method} has no draft vocabulary"
        raise InvalidValueError("draft_vocab_size", wanted, limit)
    return vocab_size


def require_trainable(
    config: TrainingConfig, start: Path | None, draft_vocab_size: int | None, directory: Path
) -> None:
    """Raise what `open_run` raises for a drafter that cannot be trained, before there are samples.

    directory: of the target.
    """
    draft_vocabulary_size(config, draft_vocab_size, directory)
    _read_start(start, config)


def open_run(
    files: TrainingFiles,
    config: TrainingConfig,
    precision: TargetPrecision,
    draft_vocab_size: int | None,
    show: Callable[[str], None],
    device: torch.device = CPU,
) -> Trainer:
    """Load everything that a run needs; it continues where its last checkpoint was made.

    draft_vocab_size: see `draft_vocabulary_size`. show: called with each line about what is loaded.
    device: of target and drafter; a run may continue on another one.

    Raises InvalidValueError, CorpusError, ModelNotFoundError and UnsupportedModelError.
    """
    directory = resolve(files.model, progress=show)
    size = draft_vocabulary_size(config, draft_vocab_size, directory)
    samples = _read_samples(files, directory)
    vocab_size = ModelConfig.from_directory(directory).vocab_size
    train, held_out = samples.split(config.held_out, config.seed)
    start, counts = _read_start(files.start, config), token_counts(train, vocab_size)
    if start is not None and config.lora_rank is not None:
        vocabulary = ReducedVocabulary(np.array(start.token_ids(vocab_size)))
    else:
        vocabulary = ReducedVocabulary.of_counts(counts, size, special_tokens(directory))
    size, counts = len(vocabulary.token_ids), token_counts(held_out, vocab_size)
    coverage = vocabulary.coverage(counts)
    show(
        f"{len(train)} samples with {train.num_tokens} tokens to train on, {len(held_out)} held "
        f"out; {size} draft tokens cover {coverage:.1%} of their answers"
    )
    evaluated = list(held_out[: config.max_held_out_samples])
    card = _card(samples, precision)
    card |= {"num_trained_samples": len(train), "num_evaluated_samples": len(evaluated)}
    card |= {"draft_vocab_size": size} | ({"start_sha256": start.digest} if start else {})
    data = Data(list(train), evaluated, vocabulary.token_ids.tolist(), card)
    longest = max(len(each.token_ids) for each in samples)
    name = portable_name(files.model)
    target = Target(directory, longest, precision, name, device, files.adapter)
    return Trainer(config, target, data, files.output, start=start)


def _read_start(start: Path | None, config: TrainingConfig) -> ExportedHead | None:
    """Read the head to train further, which must be one of these settings."""
    if start is None:
        if config.lora_rank is not None:
            raise InvalidValueError("start", None, "given: the head that the adapter is of")
        return None
    exported = ExportedHead(start)
    for name, stored in exported.settings.items():
        if (wanted := getattr(config, name)) != stored:
            raise InvalidValueError(name, wanted, f"{stored!r}, as in {start}")
    return exported


def _read_samples(files: TrainingFiles, directory: Path) -> Corpus:
    """Return the samples of a run, which must be answers of the model in `directory`."""
    if files.num_samples is not None and len(files.corpora) > 1:
        raise InvalidValueError("num_samples", files.num_samples, "left out with several corpora")
    names = ", ".join(map(str, files.corpora))
    corpora = [Corpus.open(each) for each in files.corpora]
    corpus = Corpus.join(corpora)
    if model_fingerprint(directory) != corpus.info.target_hash:
        limit = f"{corpus.info.target}, which answered in {names}"
        raise InvalidValueError("model", files.model, limit)
    adapter_hash = None if files.adapter is None else AdapterFiles.read(files.adapter).fingerprint
    for path, each in zip(files.corpora, corpora, strict=True):
        if each.info.plan.get("adapter_sha256") != adapter_hash:
            limit = f"that which answered in {path}, if any"
            raise InvalidValueError("adapter", files.adapter, limit)
    needed = max(2, files.num_samples or 0)
    if len(corpus) < needed:
        raise CorpusError(f"{names} has {len(corpus)} samples so far; {needed} are needed")
    return corpus[: files.num_samples]


def _card(samples: Corpus, precision: TargetPrecision) -> dict[str, Any]:
    """Return what a drafter's card reports of its target and its data."""
    return {
        "target": samples.info.target,
        "target_sha256": samples.info.target_hash,
        "precision": {"dtype": precision.dtype, "quantization": precision.quantization},
        "corpus": {
            "num_samples": len(samples),
            "num_tokens": samples.num_tokens,
            "num_answer_tokens": samples.num_answer_tokens,
            "temperatures": list(samples.temperatures),
            "plan": dict(samples.info.plan),
        },
    }
