"""Loading of a rank's model runner from a model directory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from specdec.config.engine import (
    DEFAULT_MODEL_OPTIONS,
    DraftLimits,
    DTypeName,
    EngineConfig,
    Kernels,
    ModelOptions,
)
from specdec.config.quantization import QuantizationMethod
from specdec.kernels.reference.state_pool import StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.cpu_decoder import NativeDecoder
from specdec.models.drafters.token_map import token_map_of
from specdec.models.dtypes import DTYPES
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head, require_finite
from specdec.models.heads.networks.base import DraftHead
from specdec.models.hybrid import HybridDecoder
from specdec.models.loading import Decoder, load_model
from specdec.models.weights.checkpoint import CPU
from specdec.sampling.row_ops import row_ops_of
from specdec.text.grammar.compiler import GrammarCompiler
from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_map import VocabularyMap
from specdec.worker.adapters import RankAdapters
from specdec.worker.batch.draft_grammars import DraftGrammars
from specdec.worker.device.decoder import DeviceDecoder
from specdec.worker.device.step_graphs import CudaGraphs, GraphCaptureError
from specdec.worker.draft_model_runner import DraftModelRunner
from specdec.worker.head.adapters import HeadAdapters
from specdec.worker.model_runner import LoadedModel
from specdec.worker.target_model_runner import ServedHead, TargetModelRunner
from specdec.worker.warm_up import warm_up_target

logger = logging.getLogger(__name__)

_NO_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of errors of memory that are no torch.OutOfMemoryError."""
_END_OF_SENTENCE = re.compile(r"\.\s|\n")


@dataclass(frozen=True)
class HeadFiles:
    """A draft head to load beside a target.

    quantization: as in `load_model`. window: attention window instead of that of the files.
    token_map, method: as in `HeadConfig.from_directory`.
    """

    directory: Path
    quantization: QuantizationMethod | None = None
    window: int | None = None
    token_map: str | None = None
    method: str | None = None

    def read(self, target: ModelConfig, directory: Path | None = None) -> HeadConfig:
        """Read the configuration, or that of another version in a directory."""
        keys = self.window, self.token_map, self.method
        return HeadConfig.from_directory(directory or self.directory, target, *keys)


@dataclass(frozen=True)
class RankModel:
    """A model of which a rank loads its shard, and how.

    limits: DraftLimits for a draft model. quantization, kernels: as in `load_model`. vocabulary: of
    a draft model, its map to the target's; None if both are the same. head: of a target.
    memory_settings: to lower where a GPU has too little memory, for errors.
    """

    directory: Path
    dtype: DTypeName
    limits: EngineConfig | DraftLimits
    quantization: QuantizationMethod | None = None
    device: torch.device = CPU
    kernels: Kernels = "auto"
    vocabulary: VocabularyMap | None = None
    head: HeadFiles | None = None
    options: ModelOptions = DEFAULT_MODEL_OPTIONS
    memory_settings: str = "max_num_seqs"


def load_warm(spec: RankModel, group: TensorParallelGroup) -> TargetModelRunner | DraftModelRunner:
    """Load this rank's shard of a target, or with DraftLimits of a draft model, and warm it up.

    Raises torch.OutOfMemoryError, which names settings, where a GPU has less memory than was
    planned with, and what `load_target` and `load_draft` raise.
    """
    limits, longest = spec.limits, spec.limits.max_model_len - 1
    with _named_memory_errors(spec.memory_settings):
        if isinstance(limits, DraftLimits):
            draft = load_draft(spec, group)
            draft.warm_up(min(limits.max_catch_up_tokens, longest))
            return draft
        target = load_target(spec, group)
        warm_up_target(target, min(limits.max_num_batched_tokens, longest), limits.max_model_len)
        return target


@contextmanager
def _named_memory_errors(settings: str) -> Iterator[None]:
    """Name settings in errors of a GPU's memory, which may be free again at the next attempt."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__ if isinstance(error, GraphCaptureError) else error
        text = str(cause)
        if not (
            isinstance(cause, torch.OutOfMemoryError) or any(each in text for each in _NO_MEMORY)
        ):
            raise
        reason = str(error).replace(text, _END_OF_SENTENCE.split(text, maxsplit=1)[0])
        message = f"the GPU has too little memory to load: {reason}; lower {settings}"
        raise torch.OutOfMemoryError(message) from error


def load_target(spec: RankModel, group: TensorParallelGroup) -> TargetModelRunner:
    """Load this rank's shard of a target, and of its draft head, and allocate the KV pool."""
    config = spec.limits
    assert isinstance(config, EngineConfig), "a draft model"
    model_config = ModelConfig.from_directory(spec.directory, spec.options)
    model = _load_model(spec, model_config, group)
    has_adapters = config.adapters is not None and spec.head is not None
    head_adapters = HeadAdapters(model.dtype) if has_adapters and spec.device == CPU else None
    adapters = RankAdapters.enabled(model, config.adapters, head_adapters)
    on_device = _uses_device(spec, model, "decodes")
    head = None
    if spec.head is not None:
        head = load_served_head(spec.head, model_config, model, head_adapters)
    target = TargetModelRunner(
        LoadedModel(
            model,
            group,
            model_config.vocab_size,
            has_padding_block=_runs_on_device(spec),
            adapters=adapters,
            states=_states_of(
                model, config.max_num_seqs, config.max_row_guesses, config.num_snapshots
            ),
            row_ops=row_ops_of(spec.kernels, spec.device),
        ),
        config,
        head=head,
        on_device=on_device,
        graphs=_graphs(spec, model, None if head is None else head.head) if on_device else None,
    )
    if target.graph_report is not None:
        logger.info("decodes run on the device: %s", target.graph_report.describe())
    if target.drafter is not None and target.drafter.has_lookups:
        logger.info("n-grams are looked up by the rank, at the end of each step")
    return target


def _states_of(
    model: Decoder, max_num_seqs: int, max_guesses: int, num_snapshots: int = 0
) -> StatePool | None:
    """Return the states of a model's recurrent layers; None without such layers."""
    decoder = model.torch_decoder if isinstance(model, NativeDecoder) else model
    if not isinstance(decoder, HybridDecoder):
        return None
    return decoder.enable_states(max_num_seqs, max_guesses, num_snapshots)


def load_served_head(
    files: HeadFiles,
    model_config: ModelConfig,
    model: Decoder,
    adapters: HeadAdapters | None = None,
) -> ServedHead:
    """Load a draft head beside a target that is loaded. adapters: of the head, if any."""
    found = files.read(model_config)

    def load(config: HeadConfig) -> DraftHead:
        head = load_head(config, model, files.quantization)
        if adapters is not None:
            adapters.serve(head, config)
        return head

    return ServedHead(load(found), partial(_load_version, found, files, load))


def _runs_on_device(spec: RankModel) -> bool:
    """Return whether decodes run between two copies; without a device there is nothing to save.

    Drafts for another vocabulary, and those of one pass, need the host.
    """
    limits, is_shared = spec.limits, spec.vocabulary is None
    drafts_alone = isinstance(limits, DraftLimits) and not limits.parallel_drafting and is_shared
    return spec.device.type == "cuda" and (isinstance(limits, EngineConfig) or drafts_alone)


def _uses_device(spec: RankModel, model: Decoder, what: str) -> bool:
    """Return whether the device can run `what` of a model; log where it cannot."""
    if not _runs_on_device(spec):
        return False
    if (reason := _host_reason(spec, model)) is not None:
        logger.info("%s run by operators of the host: %s", what, reason)
        return False
    return True


def _host_reason(spec: RankModel, model: Decoder) -> str | None:
    """Return why the host runs all steps of a model; None where the device can."""
    if not isinstance(model, DeviceDecoder):
        return "the architecture has no fixed shapes"
    if not isinstance(model, HybridDecoder):
        return None
    if isinstance(spec.limits, DraftLimits):
        return "the recurrent layers of a draft model replay its guesses"
    return None if model.has_fixed_shapes else "recurrent layers have fixed shapes in Triton alone"


def _graphs(spec: RankModel, model: Decoder, head: DraftHead | None = None) -> CudaGraphs | None:
    """Return what captures the steps of a model on a device; None where it launches operators."""
    assert isinstance(model, DeviceDecoder)
    fits = model.fits_graphs and (head is None or head.capabilities.fits_graphs)
    return CudaGraphs(spec.device) if fits and not spec.limits.enforce_eager else None


def _load_version(
    served: HeadConfig,
    files: HeadFiles,
    load: Callable[[HeadConfig], DraftHead],
    directory: Path,
) -> DraftHead:
    """Load another version of the head `served`, which was read from `files`.

    Raises what `HeadConfig.from_directory` and `load_head` raise, and UnsupportedModelError for
    other sizes and for weights that are not finite.
    """
    found = files.read(served.target, directory)
    found.require_sizes_of(served)
    require_finite(found)
    return load(found)


def load_draft(spec: RankModel, group: TensorParallelGroup) -> DraftModelRunner:
    """Load this rank's shard of a draft model, and allocate its KV pool."""
    limits = spec.limits
    assert isinstance(limits, DraftLimits), "a target"
    config = ModelConfig.from_directory(spec.directory, spec.options)
    mask_token_id = config.mask_token_id if limits.parallel_drafting else None
    assert (mask_token_id is not None) == limits.parallel_drafting, "no mask token"
    tokenizer, eos_token_ids = Tokenizer(spec.directory), config.eos_token_ids
    compiler = GrammarCompiler(tokenizer, config.vocab_size, eos_token_ids, tries_first=False)
    if limits.draft_window is not None:
        config = config.with_window(limits.draft_window)
    tokens = token_map_of(spec.directory, limits.token_map, config.vocab_size)
    model = _load_model(spec, config, group, tokens)
    draft = DraftModelRunner(
        LoadedModel(
            model,
            group,
            config.vocab_size,
            has_padding_block=_runs_on_device(spec),
            adapters=RankAdapters.enabled(model, limits.adapters),
            states=_states_of(model, limits.max_num_seqs, limits.max_draft_tokens),
            row_ops=row_ops_of(spec.kernels, spec.device),
        ),
        limits,
        grammars=DraftGrammars(compiler),
        vocabulary=spec.vocabulary,
        mask_token_id=mask_token_id,
    )
    if _uses_device(spec, model, "drafts"):
        report = draft.use_device_steps(_graphs(spec, model))
        logger.info("drafts run on the device: %s", report.describe())
    return draft


def _load_model(
    spec: RankModel,
    model_config: ModelConfig,
    group: TensorParallelGroup,
    output_tokens: Sequence[int] | None = None,
) -> Decoder:
    limits = spec.limits
    return load_model(
        spec.directory,
        model_config,
        group,
        dtype=DTYPES[spec.dtype],
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        quantization=spec.quantization,
        device=spec.device,
        kernels=spec.kernels,
        output_tokens=output_tokens,
        deterministic=isinstance(limits, EngineConfig) and limits.deterministic,
        kv_cache_dtype=limits.kv_cache_dtype,
    )
