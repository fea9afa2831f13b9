"""A report of how a model would run: decoder, memory of each rank, drafting methods that fit.

`specdec models show` prints it. Nothing is read but the configuration and the headers of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from specdec.config.engine import (
    DEFAULT_MODEL_OPTIONS,
    DTYPE_BYTES,
    DTypeName,
    EngineConfig,
    ModelOptions,
    kv_element_bytes,
    snapshot_interval,
)
from specdec.config.kv_cache import KVCacheDType
from specdec.config.model_aliases import ShippedDrafter
from specdec.config.quantization import WEIGHT_BITS, QuantizationMethod
from specdec.config.speculation.head_methods import HeadMethodConfig
from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.methods import METHODS
from specdec.engine.models.checkpoint_lint import CheckpointLint, lint_checkpoint
from specdec.engine.models.model_limits import require_experts, require_plan
from specdec.models.config.end_tokens import read_end_tokens, unused_end_tokens
from specdec.models.config.extra_weights import copied_bytes
from specdec.models.config.families.native_recurrence import as_kept
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.native_limits import native_fault
from specdec.models.config.registry import ARCHITECTURES
from specdec.models.heads.config import HeadConfig, head_method_of
from specdec.text.tokenizer import check_tokenizer
from specdec.types.errors import UnsupportedModelError
from specdec.types.sharding import partition

_SHORT_DTYPES = ("bfloat16", "float16")


class Fit(StrEnum):
    """A drafting method, and if it can be used with a model."""

    READY = "ready"
    NEEDS_FILES = "needs files"
    NO = "no"


@dataclass(frozen=True)
class MethodFit:
    """A drafting method, and why it can or cannot be used."""

    method: str
    fit: Fit
    reason: str


@dataclass(frozen=True)
class Precision:
    """The data types that a model would be served in.

    is_native: by the C++ kernels. is_triton: by Triton's, which keep quantized weights as the files
    have them.
    """

    dtype: DTypeName
    quantization: QuantizationMethod | None
    is_native: bool
    kv_cache_dtype: KVCacheDType = "auto"
    is_triton: bool = False


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, for weights and for the KV of a token.

    num_experts: of each mixture on the rank, whole or in part; 0 without a mixture.
    state_bytes: of a sequence in recurrent layers; guess_bytes: of each draft token beside it.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    num_experts: int = 0
    state_bytes: int = 0
    guess_bytes: int = 0

    @property
    def snapshot_tokens(self) -> int:
        """Tokens of KV for each snapshot of the states, with KV blocks of the default size."""
        block_size = EngineConfig.block_size
        return block_size * snapshot_interval(
            self.state_bytes, block_size * self.kv_bytes_per_token
        )


@dataclass(frozen=True)
class ModelReport:
    """Decoder, precision and limits with which a model would run.

    differences: what its family has beside Llama. checkpoint: about its files. end_tokens: the
    tokens that end a text, each with the files that name it.
    """

    directory: Path
    config: ModelConfig
    differences: str
    precision: Precision
    ranks: tuple[RankMemory, ...]
    methods: tuple[MethodFit, ...]
    checkpoint: CheckpointLint
    end_tokens: Mapping[int, tuple[str, ...]]


def report_model(
    directory: Path,
    precision: Precision,
    tensor_parallel_size: int,
    options: ModelOptions = DEFAULT_MODEL_OPTIONS,
    drafters: Sequence[ShippedDrafter] = (),
) -> ModelReport:
    """Return the report of the model in a directory.

    drafters: of its alias, which come with this package.

    Raises UnsupportedModelError for a model that cannot be served, and InvalidValueError for more
    ranks than it has heads or, with options.divides_by_expert, experts.
    """
    config = ModelConfig.from_directory(directory, options)
    if options.divides_by_expert:
        require_experts(config, tensor_parallel_size)
    require_plan("tensor_parallel_size", config, tensor_parallel_size)
    if native_fault(config) is not None:
        precision = replace(precision, is_native=False)
    named = read_end_tokens(directory, options)
    return ModelReport(
        directory=directory,
        config=config,
        differences=_differences(config),
        precision=precision,
        ranks=tuple(_ranks(config, precision, tensor_parallel_size)),
        methods=tuple(_shipped_or_fit(method, drafters, directory, config) for method in METHODS),
        checkpoint=_lint(directory, config, unused_end_tokens(named, config.vocab_size)),
        end_tokens={each: named[each] for each in sorted(config.eos_token_ids)},
    )


def _lint(directory: Path, config: ModelConfig, note: str | None) -> CheckpointLint:
    """Return the lines about the weights and the tokenizer. note: on the end tokens."""
    found = lint_checkpoint(directory, config)
    if note is not None:
        found = replace(found, notes=(*found.notes, note))
    try:
        check_tokenizer(directory)
    except UnsupportedModelError as error:
        return replace(found, faults=(*found.faults, str(error)))
    return found


def _differences(config: ModelConfig) -> str:
    if config.transformers is not None:
        return "layers of transformers' modelling code"
    return ARCHITECTURES[config.architecture].notes


def _ranks(config: ModelConfig, precision: Precision, size: int) -> Iterator[RankMemory]:
    if config.transformers is not None or config.varied is not None:
        weights = config.weight_bytes(precision.dtype) + copied_bytes(config, precision.dtype, size)
        kv_bytes = config.kv_bytes_per_token(precision.dtype, size, precision.kv_cache_dtype)
        yield from [RankMemory(weights // size, kv_bytes // size)] * size
        return
    vocab = partition(config.vocab_size, size)
    kv_bytes_of_value = kv_element_bytes(precision.dtype, precision.kv_cache_dtype)
    for rank, heads in enumerate(config.head_shards(size)):
        attention = config.num_attention_layers * config.num_attention_weights(
            len(heads.query), len(heads.kv)
        )
        head = config.hidden_size * len(vocab[rank])
        matrices = attention + config.num_mlp_weights(rank, size)
        states = (0, 0)
        if config.recurrent is not None:
            matrices += config.recurrent.num_rank_weights(config.hidden_size, rank, size)
            recurrent = as_kept(config.recurrent, is_triton=precision.is_triton)
            states = recurrent.rank_bytes(precision.dtype, rank, size)
        has_table = not config.tie_word_embeddings or precision.quantization is not None
        weights = int(matrices * _layer_bytes(config, precision))
        weights += int(head * _matrix_bytes(config, precision))
        weights += head * has_table * _table_bytes(config, precision)
        if config.latent is not None:
            of_layer = config.latent.num_expansion_weights(len(heads.query))
            exact = config.num_attention_layers * of_layer
            exact += config.latent.num_indexer_weights(config.hidden_size)
            weights += exact * _table_bytes(config, precision)
        kv_bytes = config.kv_values_per_token(rank, size) * kv_bytes_of_value
        experts = config.experts
        num_experts = 0 if experts is None else len(experts.shard(rank, size).experts)
        yield RankMemory(weights, kv_bytes, num_experts, *states)


def _layer_bytes(config: ModelConfig, precision: Precision) -> float:
    """Return the bytes of a weight of a linear layer, on average."""
    stored = config.stored_weights
    if precision.is_triton and precision.quantization is None and stored is not None:
        return stored.bits / 8
    return _matrix_bytes(config, precision)


def _matrix_bytes(config: ModelConfig, precision: Precision) -> float:
    """Return the bytes of a weight of a matrix."""
    if precision.quantization is not None:
        return WEIGHT_BITS[precision.quantization] / 8
    return _table_bytes(config, precision)


def _table_bytes(config: ModelConfig, precision: Precision) -> int:
    """Return the bytes of a weight of an embedding: 16-bit checkpoints stay as they are."""
    is_short = precision.is_native and config.checkpoint_dtype in _SHORT_DTYPES
    return 2 if is_short else DTYPE_BYTES[precision.dtype]


def _shipped_or_fit(
    name: str, drafters: Sequence[ShippedDrafter], directory: Path, config: ModelConfig
) -> MethodFit:
    for drafter in drafters:
        if drafter.method == name and drafter.has_weights:
            return MethodFit(name, Fit.READY, f"{drafter.name} comes with specdec")
    return _fit(name, directory, config)


def _fit(name: str, directory: Path, config: ModelConfig) -> MethodFit:
    method = METHODS[name]
    if method.place is DraftPlace.ENGINE:
        return MethodFit(name, Fit.READY, "it reads the text alone")
    if config.transformers is not None and issubclass(method, HeadMethodConfig):
        return MethodFit(name, Fit.NO, "transformers' code runs no draft heads")
    if method.is_in_target:
        return _fit_of_own_layers(name, directory, config)
    if issubclass(method, HeadMethodConfig) and method.has_layers_of_model:
        if config.recurrent is not None:
            reason = "beside recurrent layers, a draft model has separate ranks (draft_model)"
            return MethodFit(name, Fit.NO, reason)
        reason = "it needs a smaller model with the same vocabulary"
    elif issubclass(method, HeadMethodConfig):
        shape = f"hidden size {config.hidden_size} and {config.vocab_size} tokens"
        reason = f"it needs a head made for this model, with {shape}"
    else:
        reason = "it needs a smaller model, whose vocabulary may differ"
    if method.trained and method.trained.has_layers and not config.has_llama_layers:
        reason += "; `specdec train` makes none, because its layers would have to be Llama's"
    return MethodFit(name, Fit.NEEDS_FILES, reason)


def _fit_of_own_layers(name: str, directory: Path, config: ModelConfig) -> MethodFit:
    """Return whether the checkpoint has layers for multi-token prediction that can be used."""
    try:
        if head_method_of(directory) != name:
            reason = "the checkpoint has no layers for multi-token prediction"
            return MethodFit(name, Fit.NO, reason)
        HeadConfig.from_directory(directory, config)
    except UnsupportedModelError as error:
        return MethodFit(name, Fit.NO, str(error))
    return MethodFit(name, Fit.READY, "the checkpoint has layers for multi-token prediction")
