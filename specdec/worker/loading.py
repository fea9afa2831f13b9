"""Loading of a rank's model runner from a model directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from specdec.config.engine import DraftLimits, DTypeName, EngineConfig, Kernels
from specdec.config.quantization import QuantizationMethod
from specdec.distributed.group import TensorParallelGroup
from specdec.models.config import ModelConfig
from specdec.models.dtypes import DTYPES
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.loading import load_model
from specdec.models.weights.checkpoint import CPU
from specdec.text.grammar import GrammarCompiler
from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_map import VocabularyMap
from specdec.worker.draft_grammars import DraftGrammars
from specdec.worker.draft_model_runner import DraftModelRunner
from specdec.worker.model_runner import ModelRunner
from specdec.worker.target_model_runner import TargetModelRunner

_AnyRunner = TypeVar("_AnyRunner", bound=ModelRunner)


@dataclass(frozen=True)
class HeadFiles:
    """A draft head to load beside a target.

    quantization: as in `load_model`. window: attention window instead of that of the files.
    token_map: as in `HeadConfig.from_directory`.
    """

    directory: Path
    quantization: QuantizationMethod | None = None
    window: int | None = None
    token_map: str | None = None


def load_runner(
    directory: Path,
    dtype: DTypeName,
    config: EngineConfig,
    group: TensorParallelGroup,
    quantization: QuantizationMethod | None = None,
    device: torch.device = CPU,
    kernels: Kernels = "auto",
    head: HeadFiles | None = None,
) -> TargetModelRunner:
    """Load this rank's shard of the target, and of its draft head, and allocate the KV pool.

    quantization, kernels: as in `load_model`.
    """
    model = ModelConfig.from_directory(directory)
    target = _load(
        TargetModelRunner, directory, model, dtype, config, group, quantization, device, kernels
    )
    if head is not None:
        found = HeadConfig.from_directory(head.directory, model, head.window, head.token_map)
        target.use_head(load_head(found, target.model, head.quantization), config)
    return target


def load_draft_runner(
    directory: Path,
    dtype: DTypeName,
    limits: DraftLimits,
    group: TensorParallelGroup,
    quantization: QuantizationMethod | None = None,
    device: torch.device = CPU,
    vocabulary: VocabularyMap | None = None,
    kernels: Kernels = "auto",
) -> DraftModelRunner:
    """Load this rank's shard of a draft model and allocate its KV pool.

    vocabulary: map to the target's vocabulary; None if both are the same.
    """
    config = ModelConfig.from_directory(directory)
    mask_token_id = config.mask_token_id if limits.parallel_drafting else None
    assert (mask_token_id is not None) == limits.parallel_drafting, "no mask token"
    tokenizer, eos_token_ids = Tokenizer(directory), config.eos_token_ids
    compiler = GrammarCompiler(
        tokenizer, config.vocab_size, eos_token_ids, timeout_s=None, tries_first=False
    )
    kind = partial(
        DraftModelRunner,
        grammars=DraftGrammars(compiler),
        vocabulary=vocabulary,
        confidence_threshold=limits.confidence_threshold,
        mask_token_id=mask_token_id,
    )
    if limits.draft_window is not None:
        config = config.with_window(limits.draft_window)
    return _load(kind, directory, config, dtype, limits, group, quantization, device, kernels)


def load_warm(
    directory: Path,
    dtype: DTypeName,
    limits: EngineConfig | DraftLimits,
    group: TensorParallelGroup,
    quantization: QuantizationMethod | None,
    device: torch.device,
    kernels: Kernels,
    vocabulary: VocabularyMap | None = None,
    head: HeadFiles | None = None,
) -> TargetModelRunner | DraftModelRunner:
    """Load this rank's shard of a target, or with DraftLimits of a draft model, and warm it up.

    vocabulary: of a draft model, as in `load_draft_runner`. head: of a target.
    """
    longest = limits.max_model_len - 1
    if isinstance(limits, DraftLimits):
        draft = load_draft_runner(
            directory, dtype, limits, group, quantization, device, vocabulary, kernels
        )
        draft.warm_up(min(limits.max_catch_up_tokens, longest))
        return draft
    target = load_runner(directory, dtype, limits, group, quantization, device, kernels, head)
    target.warm_up(min(limits.max_num_batched_tokens, longest))
    return target


def _load(
    kind: Callable[..., _AnyRunner],
    directory: Path,
    model_config: ModelConfig,
    dtype: DTypeName,
    limits: EngineConfig | DraftLimits,
    group: TensorParallelGroup,
    quantization: QuantizationMethod | None,
    device: torch.device,
    kernels: Kernels,
) -> _AnyRunner:
    model = load_model(
        directory,
        model_config,
        group,
        dtype=DTYPES[dtype],
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        quantization=quantization,
        device=device,
        kernels=kernels,
    )
    return kind(
        model,
        group,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        vocab_size=model_config.vocab_size,
    )
