"""The shape of a decoder, read from a Hugging Face `config.json`.

The differences between the supported architectures are data here: biases, normalization of heads,
sliding windows, rotary embeddings. A missing key has the default of the architecture's
configuration class in transformers; see `specdec.models.registry`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from specdec.config.engine import DTYPE_BYTES, DTypeName
from specdec.config.quantization import QuantizationMethod
from specdec.models.registry import ARCHITECTURES, SAME_DECODERS, SUPPORTED_ARCHITECTURES
from specdec.models.rope import Rope, read_rope
from specdec.types.errors import InvalidValueError, ModelNotFoundError, UnsupportedModelError
from specdec.types.sampling_params import SamplingDefaults, SamplingParams
from specdec.types.sharding import HeadShard

_MAX_COUNT = 2**31 - 1
_MAX_LAYERS = 10_000
_MAX_SHOWN_CHARS = 200

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
    "rms_norm_eps",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-like decoder.

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
    sliding_windows: tuple[int | None, ...]
    checkpoint_dtype: str
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            limit = f"a divisor of num_attention_heads ({self.num_heads})"
            raise _unsupported("num_key_value_heads", self.num_kv_heads, limit)
        if self.head_dim % 2:
            raise _unsupported("head_dim", self.head_dim, "even, to be rotated by halves")
        assert len(self.sliding_windows) == self.num_layers
        mask = self.mask_token_id
        if mask is not None and (type(mask) is not int or not 0 <= mask < self.vocab_size):
            limit = f"a token id below vocab_size ({self.vocab_size})"
            raise _unsupported("pard_token", mask, limit)

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read the configuration files of a model directory.

        Raises ModelNotFoundError without config.json, UnsupportedModelError for its content.
        """
        raw = _read_json(directory / "config.json")
        if raw is None:
            raise ModelNotFoundError(f"{directory} has no config.json")
        generation = _read_json(directory / "generation_config.json") or {}
        try:
            return cls.from_dict(raw, generation)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UnsupportedModelError(
                f"{directory} has an invalid config.json ({reason})"
            ) from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a `config.json` and of a `generation_config.json`."""
        architectures = raw.get("architectures")
        if not isinstance(architectures, list | None):
            raise _unsupported("architectures", architectures, "a list of names")
        architecture = str((architectures or ["none"])[0])
        architecture = SAME_DECODERS.get(architecture, architecture)
        _require_supported(architecture, raw)
        raw = {**ARCHITECTURES[architecture].config_defaults, **raw}
        eos = generation.get("eos_token_id")
        eos = raw.get("eos_token_id") if eos is None else eos
        hidden_size, num_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
        eos_token_ids = [eos] if isinstance(eos, int) else eos or ()
        if not all(type(each) is int for each in eos_token_ids):
            raise _unsupported("eos_token_id", eos, "a token id, or a list of them")
        rms_norm_eps = raw["rms_norm_eps"]
        if type(rms_norm_eps) not in (int, float) or not 0 < rms_norm_eps < 1:
            raise _unsupported("rms_norm_eps", rms_norm_eps, "a number above 0 and below 1")
        return cls(
            architecture=architecture,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=_count(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_count(raw, "num_key_value_heads", num_heads),
            head_dim=_count(raw, "head_dim", hidden_size // num_heads),
            rms_norm_eps=rms_norm_eps,
            rope=read_rope(raw),
            max_position_embeddings=_count(raw, "max_position_embeddings"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
            eos_token_ids=frozenset(eos_token_ids),
            sampling_defaults=read_sampling_defaults(generation),
            has_qkv_bias=_has_qkv_bias(architecture, raw),
            has_output_bias=architecture != "Qwen2ForCausalLM" and _has_qkv_bias(architecture, raw),
            has_mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias")),
            has_qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_windows=_sliding_windows(architecture, raw),
            # transformers 5 renamed torch_dtype to dtype.
            checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            mask_token_id=raw.get("pard_token", raw.get("ptd_token_id")),
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the decoder, a tied head counted once."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv_biases = self.has_qkv_bias * (query + 2 * kv)
        mlp_biases = self.has_mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        biases = qkv_biases + self.has_output_bias * self.hidden_size + mlp_biases
        norms = 2 * self.hidden_size + self.has_qk_norm * 2 * self.head_dim
        embeddings = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        vectors = self.num_layers * (biases + norms) + self.hidden_size
        return self._num_matrix_elements + embeddings + vectors

    def weight_bytes(self, dtype: DTypeName, quantization: QuantizationMethod | None = None) -> int:
        """Return the memory of the weights on all ranks together.

        An upper bound: native matrices of a float32 model may stay in the dtype of the checkpoint.
        """
        element_bytes = DTYPE_BYTES[dtype]
        if quantization is None:
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
    def _num_matrix_elements(self) -> int:
        """Weights of linear layers and the output head, which quantization applies to."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size

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


def _require_supported(architecture: str, raw: Mapping[str, Any]) -> None:
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UnsupportedModelError(
            f"architecture {architecture} is not supported; supported: {supported}"
        )
    missing = [name for name in _REQUIRED_KEYS if name not in raw]
    if missing:
        raise UnsupportedModelError(f"config.json has no {', '.join(missing)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise _unsupported("hidden_act", raw["hidden_act"], "silu")
    if (quantization := raw.get("quantization_config")) is not None:
        from specdec.models.weights.dequantize import (
            weight_format,  # imports torch, which few processes need
        )

        weight_format(quantization)


def _has_qkv_bias(architecture: str, raw: Mapping[str, Any]) -> bool:
    fixed = {"MistralForCausalLM": False, "Qwen2ForCausalLM": True}
    return fixed.get(architecture, bool(raw.get("attention_bias")))


def _sliding_windows(architecture: str, raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer; None for full attention."""
    num_layers = _count(raw, "num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise _unsupported("num_hidden_layers", num_layers, f"at most {_MAX_LAYERS}")
    match architecture:
        case "MistralForCausalLM":
            if raw.get("layer_types") is not None:
                raise _unsupported("layer_types", raw["layer_types"], "left out of a Mistral model")
            has_window = [raw["sliding_window"] is not None] * num_layers
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM":
            has_window = _qwen_layers_with_window(raw, num_layers)
        case _:
            has_window = [False] * num_layers
    return tuple(_count(raw, "sliding_window") if has else None for has in has_window)


def _qwen_layers_with_window(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    is_used = bool(raw.get("use_sliding_window")) and raw["sliding_window"] is not None
    types = raw.get("layer_types")
    if types is None:
        return [is_used and index >= raw["max_window_layers"] for index in range(num_layers)]
    allowed = {"full_attention", "sliding_attention"} if is_used else {"full_attention"}
    if len(types) != num_layers or not allowed.issuperset(types):
        limit = f"{num_layers} times {' or '.join(sorted(allowed))}"
        raise _unsupported("layer_types", types, limit)
    return [each == "sliding_attention" for each in types]


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 < value <= _MAX_COUNT:
        raise _unsupported(name, value, f"a whole number from 1 to {_MAX_COUNT}")
    return value


def _unsupported(name: str, value: object, limit: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} in config.json is {_shown(value)}; it must be {limit}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


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
