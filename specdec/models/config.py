"""The shape of a decoder, read from a Hugging Face `config.json`.

`specdec.models.registry` specifies how an architecture's keys are read. A missing key has the
default of the architecture's configuration class in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from specdec.config.engine import DTYPE_BYTES, DTypeName, ModelImpl
from specdec.config.quantization import QuantizationMethod
from specdec.models.architecture import has
from specdec.models.config_values import count, fraction, unsupported
from specdec.models.layer_patterns import LayerRopes, Windows
from specdec.models.registry import ARCHITECTURES, SAME_DECODERS, TEXT_MODELS, architecture_of
from specdec.models.rope import DefaultRope, LongRope, Rope, read_rope
from specdec.models.traits import LLAMA, DecoderTraits, Experts, Latent, QkNorm
from specdec.models.transformers_config import (
    TransformersModel,
    read_transformers_shape,
    transformers_fault,
)
from specdec.models.unsupported import explain_unsupported
from specdec.types.errors import InvalidValueError, ModelNotFoundError, UnsupportedModelError
from specdec.types.sampling_params import SamplingDefaults, SamplingParams
from specdec.types.sharding import HeadShard

_MAX_LAYERS = 10_000

_SPELLINGS = {"max_tokens": "max_new_tokens"}


def read_sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Return the fields of generation_config.json that are set and not null.

    `do_sample` is ignored, as in vLLM: the temperature is a number. Raises UnsupportedModelError
    for an invalid value.
    """
    names = {each.name: _SPELLINGS.get(each.name, each.name) for each in fields(SamplingDefaults)}
    given = {
        name: generation[spelling]
        for name, spelling in names.items()
        if generation.get(spelling) is not None
    }
    if given.get("top_k") == -1:  # all tokens, as 0
        given["top_k"] = 0
    try:
        SamplingParams(**given)
        return SamplingDefaults(**given)
    except (InvalidValueError, TypeError) as error:
        raise UnsupportedModelError(f"generation_config.json: {error}") from error


_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


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
    latent: sizes of latent attention; all heads then share a key of head_dim, which is num_kv_heads
        1; None for other attention.
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
    text_part_of: str | None = None
    transformers: TransformersModel | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            limit = f"a divisor of num_attention_heads ({self.num_heads})"
            raise unsupported("num_key_value_heads", self.num_kv_heads, limit)
        if self.head_dim % 2 and self.transformers is None:
            raise unsupported("head_dim", self.head_dim, "even, to be rotated by halves")
        self._check_ropes()
        assert len(self.sliding_windows) == self.num_layers
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
                for name in ("short_factors", "long_factors"):
                    found, expected = len(getattr(rope, name)), self.rotary_dim // 2
                    if found != expected:
                        key, limit = name.removesuffix("s"), f"a list of {expected} numbers"
                        raise unsupported(key, f"a list of {found}", limit)

    @classmethod
    def from_directory(cls, directory: Path, model_impl: ModelImpl = "auto") -> ModelConfig:
        """Read the configuration files of a model directory.

        model_impl: whose code is to run it; "auto" prefers this project's decoder.

        Raises ModelNotFoundError without config.json, UnsupportedModelError for its content.
        """
        raw = _read_json(directory / "config.json")
        if raw is None:
            raise ModelNotFoundError(f"{directory} has no config.json")
        generation = _read_json(directory / "generation_config.json") or {}
        try:
            if _needs_transformers(raw, model_impl):
                return cls._of_transformers(directory, raw, generation)
            return cls.from_dict(raw, generation)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UnsupportedModelError(
                f"{directory} has an invalid config.json ({reason})"
            ) from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a `config.json` and of a `generation_config.json`."""
        whole = _architecture(raw)
        architecture = TEXT_MODELS.get(whole, whole)
        family = ARCHITECTURES[architecture]
        if whole in TEXT_MODELS:
            raw = _text_config(raw, family.model_type)
        raw = {**family.config_defaults, **raw}
        _require_keys(raw, (*_REQUIRED_KEYS, family.norm_eps_key))
        hidden_size, num_heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
        latent = family.latent(raw)
        num_layers = count(raw, "num_hidden_layers")
        if num_layers > _MAX_LAYERS:
            raise unsupported("num_hidden_layers", num_layers, f"at most {_MAX_LAYERS}")
        windows = family.windows(raw, num_layers)
        ropes = family.ropes(raw, windows)
        return cls(
            architecture=architecture,
            text_part_of=whole if whole in TEXT_MODELS else None,
            vocab_size=count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=1 if latent else count(raw, "num_key_value_heads", num_heads),
            head_dim=latent.key_dim if latent else _head_dim(raw, hidden_size, num_heads),
            latent=latent,
            rms_norm_eps=fraction(raw, family.norm_eps_key),
            rope=_main_rope(ropes, windows) or read_rope(raw),
            layer_ropes=ropes,
            rotary_fraction=family.rotary_fraction(raw),
            experts=family.experts(raw, num_layers),
            traits=replace(family.traits(raw), activation=family.activation(raw)),
            max_position_embeddings=count(raw, "max_position_embeddings"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
            eos_token_ids=_eos_token_ids(raw, generation),
            sampling_defaults=read_sampling_defaults(generation),
            has_qkv_bias=has(raw, family.qkv_bias),
            has_output_bias=has(raw, family.output_bias),
            has_mlp_bias=has(raw, family.mlp_bias),
            has_qk_norm=has(raw, family.qk_norm),
            sliding_windows=windows,
            # transformers 5 renamed torch_dtype to dtype.
            checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            mask_token_id=raw.get("pard_token", raw.get("ptd_token_id")),
        )

    @classmethod
    def _of_transformers(
        cls, directory: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        found = read_transformers_shape(directory)
        return cls(
            architecture=found.model.class_name,
            vocab_size=found.vocab_size,
            hidden_size=found.hidden_size,
            intermediate_size=found.intermediate_size,
            num_layers=found.num_layers,
            num_heads=found.num_heads,
            num_kv_heads=found.num_kv_heads,
            head_dim=found.head_dim,
            rms_norm_eps=1e-5,
            rope=DefaultRope(10_000.0),
            max_position_embeddings=found.max_position_embeddings,
            tie_word_embeddings=found.tie_word_embeddings,
            eos_token_ids=_eos_token_ids(raw, generation),
            sampling_defaults=read_sampling_defaults(generation),
            has_qkv_bias=False,
            has_output_bias=False,
            has_mlp_bias=False,
            has_qk_norm=False,
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
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv_biases = self.has_qkv_bias * (query + 2 * kv)
        inner = self.intermediate_size * (1 + self.traits.has_gate)
        biases = qkv_biases + self.has_output_bias * self.hidden_size
        biases += self.has_mlp_bias * (inner + self.hidden_size)
        qk_norms = 2 * self.head_dim if self.traits.qk_norm is QkNorm.HEAD else query + kv
        norm_size = self.hidden_size * (1 + self.traits.has_norm_bias)
        norms = self.traits.num_layer_norms * norm_size + self.has_qk_norm * qk_norms
        embeddings = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        vectors = self.num_layers * (biases + norms) + norm_size
        vectors += self.num_layers * self.num_heads * self.traits.has_sinks
        if self.latent is not None:
            latents = self.latent.rank + (self.latent.query_rank or 0)
            expansion = self.latent.num_expansion_weights(self.num_heads)
            vectors += self.num_layers * (latents + expansion)
        if self.experts is not None:  # their router stays in the model's dtype
            count, units = self.experts.count, self.experts.intermediate_size
            of_layer = count * self.hidden_size
            if self.experts.has_bias:
                of_layer += count * ((1 + self.traits.has_gate) * units + self.hidden_size + 1)
            if self.experts.routing is not None:
                of_layer += count * self.experts.routing.has_bias
            vectors += len(self.experts.layers) * of_layer
        return self._num_matrix_elements + embeddings + vectors

    def weight_bytes(self, dtype: DTypeName, quantization: QuantizationMethod | None = None) -> int:
        """Return the memory of the weights on all ranks together.

        An upper bound: native matrices of a float32 model may stay in the dtype of the checkpoint.
        """
        element_bytes = DTYPE_BYTES[dtype]
        if quantization is None or self.transformers is not None:
            return self.num_parameters * element_bytes
        vocabulary = self.vocab_size * self.hidden_size
        # A tied embedding shares its table with the head only if the head is not quantized.
        table = vocabulary if self.tie_word_embeddings else 0
        rest = self.num_parameters - self._num_matrix_elements + table
        return self._num_matrix_elements + rest * element_bytes

    def adapter_bytes(self, rank: int, dtype: DTypeName, tensor_parallel_size: int = 1) -> int:
        """Return the memory of an adapter of all linear layers, on all ranks together.

        Layers that divide their outputs have A on every rank, the others B. An upper bound, as in
        `weight_bytes`.
        """
        hidden, size = self.hidden_size, tensor_parallel_size
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        units = 2 * self.intermediate_size
        by_outputs = 5 * hidden * size + heads + units
        by_inputs = self.num_heads * self.head_dim + self.intermediate_size + 2 * hidden * size
        return self.num_layers * rank * (by_outputs + by_inputs) * DTYPE_BYTES[dtype]

    @property
    def mlp_matrices(self) -> int:
        """Matrices [intermediate_size, hidden_size] of an MLP."""
        return 2 + self.traits.has_gate

    def num_hidden_units(self, layer: int) -> int:
        """Return the hidden units of a layer's MLP, or of all of its experts."""
        experts = self.experts
        if experts is None or layer not in experts.layers:
            return self.intermediate_size
        return experts.count * experts.intermediate_size + experts.shared_size

    @property
    def has_llama_layers(self) -> bool:
        """Return whether all layers are Llama's, as those of drafters that are trained here."""
        is_dense = self.experts is None and self.latent is None and self.transformers is None
        return is_dense and self.traits == LLAMA and set(self.ropes) == {self.rope}

    @property
    def _num_matrix_elements(self) -> int:
        """Weights of linear layers and the output head, which quantization applies to."""
        attention = self.num_attention_weights(self.num_heads, self.num_kv_heads)
        hidden_units = sum(map(self.num_hidden_units, range(self.num_layers)))
        mlps = self.mlp_matrices * self.hidden_size * hidden_units
        return self.num_layers * attention + mlps + self.vocab_size * self.hidden_size

    def num_attention_weights(self, num_heads: int, num_kv_heads: int) -> int:
        """Return the weights of the linear layers of a layer's attention, with these heads."""
        if self.latent is not None:
            return self.latent.num_projection_weights(self.hidden_size, num_heads)
        return 2 * (num_heads + num_kv_heads) * self.head_dim * self.hidden_size

    def with_window(self, window: int) -> ModelConfig:
        """Return the model with at most `window` visible tokens in each layer."""
        windows = tuple(
            window if each is None else min(each, window) for each in self.sliding_windows
        )
        return replace(self, sliding_windows=windows)

    def head_shards(self, tensor_parallel_size: int) -> tuple[HeadShard, ...]:
        """Return the heads of each rank. Raises InvalidValueError for more ranks than heads."""
        return HeadShard.all_ranks(self.num_heads, self.num_kv_heads, tensor_parallel_size)

    def kv_bytes_per_token(self, dtype: DTypeName, tensor_parallel_size: int = 1) -> int:
        """Return the size of the KV of one token over all layers, on all ranks together.

        Some KV heads may be on several ranks. Tokens outside every layer's window keep their slots.
        """
        num_kv_heads = sum(len(shard.kv) for shard in self.head_shards(tensor_parallel_size))
        return 2 * self.num_layers * num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def _architecture(raw: Mapping[str, Any]) -> str:
    """Return the name of a supported architecture, by `architectures` or by `model_type`.

    It may be one of TEXT_MODELS.

    Raises UnsupportedModelError, with the reason, for others and for quantized weights that cannot
    be read.
    """
    names = raw.get("architectures")
    if not isinstance(names, list | None):
        raise unsupported("architectures", names, "a list of names")
    found = str(names[0]) if names else architecture_of(str(raw.get("model_type")))
    architecture = SAME_DECODERS.get(found or "", found)
    if architecture is None or architecture not in {*ARCHITECTURES, *TEXT_MODELS}:
        raise UnsupportedModelError(explain_unsupported(architecture, raw))
    if (quantization := raw.get("quantization_config")) is not None:
        from specdec.models.weights.dequantize import (
            weight_format,  # imports torch, which few processes need
        )

        weight_format(quantization)
    return architecture


def _needs_transformers(raw: Mapping[str, Any], model_impl: ModelImpl) -> bool:
    """Return whether transformers' code runs a model.

    Raises UnsupportedModelError, with the reason, for a model that it would have to run and cannot.
    """
    names = raw.get("architectures") or [architecture_of(str(raw.get("model_type")))]
    found = names[0] if isinstance(names, list) else names
    if not isinstance(found, str | None) or model_impl == "specdec":
        return False
    if model_impl == "auto" and found in {*ARCHITECTURES, *SAME_DECODERS, *TEXT_MODELS}:
        return False
    if fault := transformers_fault(raw):
        if model_impl == "auto":
            raise UnsupportedModelError(explain_unsupported(found, raw, fault))
        raise UnsupportedModelError(f"model_impl transformers cannot run the model: {fault}")
    return True


def _text_config(raw: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """Return the keys of the text model, and those of the whole that it shares."""
    nested = raw.get("text_config")
    if not isinstance(nested, dict):
        raise unsupported("text_config", nested, "an object")
    found = nested.get("model_type", model_type)
    if found != model_type:
        raise unsupported("text_config.model_type", found, model_type)
    shared = ("eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
    return nested | {key: raw[key] for key in shared if raw.get(key) is not None}


def _require_keys(raw: Mapping[str, Any], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in raw]
    if missing:
        raise UnsupportedModelError(f"config.json has no {', '.join(missing)}")


def _head_dim(raw: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    return count(raw, "head_dim", hidden_size // num_heads)


def _main_rope(ropes: LayerRopes, windows: Windows) -> Rope | None:
    """Return the rotary embedding of layers with full attention, else that of others."""
    by_window = zip(ropes, windows, strict=True)
    found: list[Rope] = [rope for rope, window in by_window if rope is not None and window is None]
    found += [rope for rope in ropes if rope is not None]
    return found[0] if found else None


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    eos = generation.get("eos_token_id")
    eos = raw.get("eos_token_id") if eos is None else eos
    token_ids = [eos] if isinstance(eos, int) else eos or ()
    if not all(type(each) is int for each in token_ids):
        raise unsupported("eos_token_id", eos, "a token id, or a list of them")
    return frozenset(token_ids)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} is not a JSON object")
    return content
