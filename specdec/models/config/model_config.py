"""The shape of a decoder, read from a Hugging Face `config.json`.

`models.config.registry` specifies how an architecture's keys are read. A missing key has the
default of the architecture's configuration class in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from specdec.config.engine import (
    DEFAULT_MODEL_OPTIONS,
    DTYPE_BYTES,
    DTypeName,
    ModelOptions,
    kv_element_bytes,
)
from specdec.config.hf_overrides import with_overrides
from specdec.config.json_values import count, fraction, head_dim_of, unsupported
from specdec.config.kv_cache import KVCacheDType
from specdec.config.quantization import WEIGHT_BITS, QuantizationMethod
from specdec.models.config.architecture import has
from specdec.models.config.attention.latent import Latent
from specdec.models.config.attention.varied_layers import VariedLayers
from specdec.models.config.config_files import (
    DecoderFields,
    decoder_of,
    errors_of,
    needs_transformers,
    num_layers_of,
    read_generation_config,
    read_json,
    read_sampling_defaults,
    supported_architecture,
)
from specdec.models.config.end_tokens import find_end_tokens
from specdec.models.config.families.text_models import TEXT_MODELS
from specdec.models.config.layer_patterns import LayerRopes, Windows, main_rope
from specdec.models.config.recurrent import Recurrent
from specdec.models.config.rope import DefaultRope, LongRope, Rope, longest_context, read_rope
from specdec.models.config.stored_weights import StoredWeights, quantization_names, stored_weights
from specdec.models.config.tied_head import has_own_head
from specdec.models.config.traits import LLAMA, DecoderTraits, Experts, QkNorm
from specdec.models.config.transformers_config import TransformersModel, read_transformers_shape
from specdec.models.weights.quantization_config import with_quantization
from specdec.types.errors import ModelNotFoundError
from specdec.types.sampling.sampling_params import SamplingDefaults
from specdec.types.sharding import HeadShard, partition

_SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "max_position_embeddings", "tie_word_embeddings"),
)
_OPTIONAL = ("has_qkv_bias", "has_output_bias", "has_mlp_bias", "has_qk_norm")
_WITHOUT: Mapping[str, Any] = dict.fromkeys(_OPTIONAL, False)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder.

    rms_norm_eps: of all norms. rope: of most layers, which a head's layers share; layer_ropes: of
        each layer, None where it has none; empty if all have `rope`. rotary_fraction: the part of
        each head that is rotated.
    transformers: the model of transformers whose code runs it; None where this project's decoder
        does. The fields of layers then have no meaning, except for the sizes of heads.
    text_part_of: the architecture of a model that also reads images, of which this is the text
        model; None for others.
    traits: how the layers differ from Llama's. experts: in place of the MLP of some layers.
    recurrent: the layers without attention; None where all have it. varied: sizes of layers that
        differ from each other, whose heads and MLP are then not those of the fields.
    latent: sizes of latent attention; all heads then share a key of head_dim, which is num_kv_heads
        1; None for other attention.
    stored_quantization: names of the method by which the weights in the files are quantized.
        stored_weights: their size, where GPUs have kernels for them.
    checkpoint_dtype: as in the file; it may be a dtype that models cannot run in.
    has_qkv_bias, has_output_bias: of attention's input and output projections.
    has_qk_norm: whether each query and key head is normalized before its rotation.
    sliding_windows: number of tokens visible to a query in each layer, itself included; None: all.
    mask_token_id: the token that stands for unknown ones in a draft model that was trained to
        draft in parallel (`pard_token`, in other files `ptd_token_id`); None for other models.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    sampling_defaults: SamplingDefaults
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    sliding_windows: Windows
    checkpoint_dtype: str
    mask_token_id: int | None = None
    layer_ropes: LayerRopes = ()
    rotary_fraction: float = 1.0
    traits: DecoderTraits = LLAMA
    experts: Experts | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    varied: VariedLayers | None = None
    text_part_of: str | None = None
    transformers: TransformersModel | None = None
    stored_quantization: tuple[str, ...] = ()
    stored_weights: StoredWeights | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            limit = f"a divisor of num_attention_heads ({self.num_heads})"
            raise unsupported("num_key_value_heads", self.num_kv_heads, limit)
        if self.head_dim % 2 and self.transformers is None:
            raise unsupported("head_dim", self.head_dim, "even, to be rotated by halves")
        self._check_ropes()
        assert len(self.sliding_windows) == self.num_layers
        assert all(0 <= each < self.vocab_size for each in self.eos_token_ids)
        mask = self.mask_token_id
        if mask is not None and (type(mask) is not int or not 0 <= mask < self.vocab_size):
            limit = f"a token id below vocab_size ({self.vocab_size})"
            raise unsupported("pard_token", mask, limit)

    def _check_ropes(self) -> None:
        assert len(self.layer_ropes) in (0, self.num_layers)
        if self.rotary_dim % 2 or self.rotary_dim == 0:
            limit = f"such that it rotates an even number of the {self.head_dim} dimensions"
            raise unsupported("partial_rotary_factor", self.rotary_fraction, limit)
        for rope in {self.rope, *self.layer_ropes}:
            if isinstance(rope, LongRope):
                rope.require_factors(self.rotary_dim // 2)

    @classmethod
    def from_directory(
        cls, directory: Path, options: ModelOptions = DEFAULT_MODEL_OPTIONS
    ) -> ModelConfig:
        """Read the configuration files of a model directory.

        Raises ModelNotFoundError without config.json, UnsupportedModelError for its content.
        """
        raw = read_json(directory / "config.json")
        if raw is None:
            raise ModelNotFoundError(f"{directory} has no config.json")
        raw = with_overrides(with_quantization(directory, raw), options.overrides)
        generation = read_generation_config(directory, options)
        with errors_of(directory):
            found = (
                cls._of_transformers(directory, raw, generation)
                if needs_transformers(raw, options.impl)
                else cls.from_dict(raw, generation)
            )
            ends = find_end_tokens(directory, raw, generation)
        if found.tie_word_embeddings and found.transformers is None and has_own_head(directory):
            found = replace(found, tie_word_embeddings=False)
        usable = frozenset(each for each in ends if 0 <= each < found.vocab_size)
        found = replace(found, eos_token_ids=usable)
        return found.divided_by_expert() if options.divides_by_expert else found

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """Read all but end tokens of a `config.json` and of a `generation_config.json`."""
        whole = supported_architecture(raw)
        return cls.from_fields(whole, decoder_of(whole, raw), generation)

    @classmethod
    def from_fields(cls, whole: str, decoder: DecoderFields, generation: Mapping[str, Any]) -> Self:
        """Read all but end tokens of what `supported_architecture` and `decoder_of` return."""
        architecture, family, fields = decoder
        raw = family.canonical(fields)
        hidden_size, num_heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
        windows = family.windows(raw, num_layers_of(raw))
        ropes, latent = family.ropes_of(raw, windows), family.latent and family.latent(raw)
        return cls(
            architecture=architecture,
            text_part_of=whole if whole in TEXT_MODELS else None,
            vocab_size=count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=count(raw, "intermediate_size"),
            num_layers=len(windows),
            num_heads=num_heads,
            num_kv_heads=1 if latent else count(raw, "num_key_value_heads", num_heads),
            head_dim=latent.key_dim if latent else head_dim_of(raw, hidden_size, num_heads),
            latent=latent,
            recurrent=family.recurrent(raw, len(windows)) if family.recurrent else None,
            varied=family.varied(raw, len(windows)) if family.varied else None,
            rms_norm_eps=fraction(raw, family.norm_eps_key),
            rope=main_rope(ropes, windows) or read_rope(raw),
            layer_ropes=ropes,
            rotary_fraction=family.rotary_fraction(raw) if family.rotary_fraction else 1.0,
            experts=family.experts(raw, len(windows)) if family.experts else None,
            traits=family.traits_of(raw),
            max_position_embeddings=longest_context(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
            eos_token_ids=frozenset(),
            sampling_defaults=read_sampling_defaults(generation),
            has_qkv_bias=has(raw, family.qkv_bias),
            has_output_bias=has(raw, family.bias_of_output),
            has_mlp_bias=has(raw, family.mlp_bias),
            has_qk_norm=has(raw, family.qk_norm),
            sliding_windows=windows,
            checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            mask_token_id=raw.get("pard_token", raw.get("ptd_token_id")),
            stored_quantization=quantization_names(raw.get("quantization_config")),
            stored_weights=stored_weights(raw.get("quantization_config")),
        )

    @classmethod
    def _of_transformers(
        cls, directory: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        found = read_transformers_shape(directory)
        return cls(
            architecture=found.model.class_name,
            **{name: getattr(found, name) for name in _SHAPE},
            rms_norm_eps=1e-5,
            rope=DefaultRope(10_000.0),
            eos_token_ids=frozenset(),
            sampling_defaults=read_sampling_defaults(generation),
            **_WITHOUT,
            sliding_windows=(None,) * found.num_layers,
            checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            transformers=found.model,
        )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head, from the first on, that are rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.rotary_fraction)

    @property
    def ropes(self) -> LayerRopes:
        """The rotary embedding of each layer; None: it has none."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def num_parameters(self) -> int:
        """Weights of the decoder, a tied head counted once."""
        if self.transformers is not None:
            return self.transformers.num_parameters
        if self.varied is not None:
            sizes, rows = (self.hidden_size, self.num_heads), self.vocab_size + 1
            rows += self.vocab_size * (not self.tie_word_embeddings)
            layers = self.varied.num_weights(*sizes, self.experts, has_bias=self.has_qkv_bias)
            return layers + rows * self.hidden_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gates = query * self.traits.has_gates_beside_queries
        attention = self.has_qkv_bias * (query + gates + 2 * kv)
        attention += self.has_output_bias * self.hidden_size
        inner = self.intermediate_size * (1 + self.traits.has_gate)
        biases = self.has_mlp_bias * (inner + self.hidden_size)
        of_norms = {QkNorm.HEAD: 2 * self.head_dim, QkNorm.ROTATED_HEAD: 0}
        qk_norms = of_norms.get(self.traits.qk_norm, query + kv)
        norm_size = self.hidden_size * (1 + self.traits.has_norm_bias)
        norms = self.traits.num_layer_norms * norm_size + self.traits.num_activation_weights
        attention += self.has_qk_norm * qk_norms + self.num_heads * self.traits.has_sinks
        embeddings = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        vectors = self.num_mlps * biases + self.num_layers * norms + norm_size
        vectors += self.num_attention_layers * attention
        if self.recurrent is not None:
            vectors += self.recurrent.num_vector_weights(self.hidden_size)
        if self.latent is not None:
            counts = self.hidden_size, self.num_heads, self.num_attention_layers
            vectors += self.latent.num_exact_weights(*counts)
        if self.experts is not None:  # their router stays in the model's dtype
            of_layer = self.experts.num_vector_weights(self.hidden_size, 1 + self.traits.has_gate)
            vectors += len(self.experts.layers) * of_layer
        return self._num_matrix_elements + embeddings + vectors

    def weight_bytes(
        self,
        dtype: DTypeName,
        quantization: QuantizationMethod | None = None,
        *,
        keeps_stored: bool = False,
    ) -> int:
        """Return the memory of the weights on all ranks together.

        keeps_stored: whether `stored_weights` stay as the files have them. An upper bound: native
        matrices of a float32 model may stay in the dtype of the checkpoint.
        """
        element_bytes = DTYPE_BYTES[dtype]
        if keeps_stored and self.stored_weights is not None and quantization is None:
            packed = self._num_matrix_elements - self.vocab_size * self.hidden_size
            rest = self.num_parameters - packed
            return int(packed * self.stored_weights.bits / 8) + rest * element_bytes
        if quantization is None or self.transformers is not None:
            return self.num_parameters * element_bytes
        vocabulary = self.vocab_size * self.hidden_size
        # A tied embedding shares its table with the head only if the head is not quantized.
        table = vocabulary if self.tie_word_embeddings else 0
        rest = self.num_parameters - self._num_matrix_elements + table
        return int(self._num_matrix_elements * WEIGHT_BITS[quantization] / 8) + rest * element_bytes

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention, and so with KV."""
        return self.num_layers - len(self.recurrent.without_attention if self.recurrent else ())

    @property
    def num_mlps(self) -> int:
        """Layers with an MLP or a mixture."""
        mlps = self.recurrent.mlps if self.recurrent else None
        return self.num_layers if mlps is None else len(mlps)

    def num_mlp_weights(self, rank: int, tensor_parallel_size: int) -> int:
        """Return the weights of the matrices of all MLPs and experts of a rank."""
        size, hidden, matrices = tensor_parallel_size, self.hidden_size, 2 + self.traits.has_gate
        experts, num_dense, of_sparse = self.experts, self.num_mlps, 0
        if experts is not None:
            num_dense -= len(experts.layers)
            of_layer = experts.num_matrix_weights(hidden, matrices, rank, size)
            of_sparse = len(experts.layers) * of_layer
        units = len(partition(self.intermediate_size, size)[rank])
        return num_dense * matrices * hidden * units + of_sparse

    @property
    def has_llama_layers(self) -> bool:
        """Return whether all layers are Llama's, as those of drafters that are trained here."""
        kinds = (self.experts, self.latent, self.recurrent, self.varied, self.transformers)
        return not any(kinds) and self.traits == LLAMA and set(self.ropes) == {self.rope}

    @property
    def _num_matrix_elements(self) -> int:
        """Weights of linear layers and the output head, which quantization applies to."""
        attention = self.num_attention_weights(self.num_heads, self.num_kv_heads)
        others = self.num_mlp_weights(0, 1)
        if self.recurrent is not None:
            others += self.recurrent.num_matrix_weights(self.hidden_size)
        return self.num_attention_layers * attention + others + self.vocab_size * self.hidden_size

    def num_attention_weights(self, num_heads: int, num_kv_heads: int) -> int:
        """Return the weights of the linear layers of a layer's attention, with these heads."""
        if self.latent is not None:
            return self.latent.num_projection_weights(self.hidden_size, num_heads)
        gates = num_heads * self.traits.has_attention_gate
        return (2 * (num_heads + num_kv_heads) + gates) * self.head_dim * self.hidden_size

    def divided_by_expert(self) -> ModelConfig:
        """Return the model with whole experts on each rank; itself if it has none."""
        if self.transformers is not None:
            whole = replace(self.transformers, is_divided_by_expert=True)
            return replace(self, transformers=whole)
        if self.experts is None:
            return self
        return replace(self, experts=replace(self.experts, is_divided_by_expert=True))

    def largest_weight_share(self, tensor_parallel_size: int) -> float:
        """Return the share of the weights on the fullest rank, slightly overestimated."""
        shards = self.head_shards(tensor_parallel_size)
        share = max(len(shard.query) for shard in shards) / self.num_heads
        if self.experts is None:
            return share
        own = (self.experts.shard(rank, tensor_parallel_size) for rank in range(len(shards)))
        return max(share, max(each.num_units for each in own) / self.experts.num_units)

    def with_window(self, window: int) -> ModelConfig:
        """Return the model with at most `window` visible tokens in each layer."""
        windows = (window if each is None else min(each, window) for each in self.sliding_windows)
        return replace(self, sliding_windows=tuple(windows))

    def head_shards(self, tensor_parallel_size: int) -> tuple[HeadShard, ...]:
        """Return the heads of each rank. Raises InvalidValueError for more ranks than heads."""
        return HeadShard.all_ranks(self.num_heads, self.num_kv_heads, tensor_parallel_size)

    def kv_bytes_per_token(
        self,
        dtype: DTypeName,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> int:
        """Return the size of the KV of one token over all layers, on all ranks together.

        dtype: of the model. Some KV heads may be on several ranks. Tokens outside every layer's
        window keep their slots.
        """
        size = tensor_parallel_size
        values = sum(self.kv_values_per_token(rank, size) for rank in range(size))
        return values * kv_element_bytes(dtype, kv_cache_dtype)

    def kv_values_per_token(self, rank: int, tensor_parallel_size: int) -> int:
        """Return the numbers in the KV of one token over all layers, on one rank."""
        if self.varied is not None:
            width = self.varied.kv_width(self.num_heads, rank, tensor_parallel_size)
            return 2 * len(self.varied.kv_places) * width
        parts, dim = (2, self.head_dim) if self.latent is None else (1, self.latent.cached_dim)
        width = len(self.head_shards(tensor_parallel_size)[rank].kv) * dim
        return parts * self.num_attention_layers * width
