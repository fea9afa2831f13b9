"""Configuration: frozen, checked where it is made, unknown keys refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from specdec.dequantize import weight_format
from specdec.errors import InvalidValueError, ModelNotFoundError, UnsupportedModelError
from specdec.sampling_params import (
    MAX_NUM_SPECULATIVE_TOKENS,
    SPECULATION_METHODS,
    SpeculationMethod,
)

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)

_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)

DTypeName = Literal["float32", "bfloat16"]
DTYPES: dict[DTypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

QuantizationMethod = Literal["int8", "w8a8"]
"""How linear layers hold matrices, and multiply: `int8` by rows in 16 bits, `w8a8` by rows in 8
bits, which is faster and for drafts alone. A row's product never depends on the batch."""

QUANTIZATION_METHODS: tuple[QuantizationMethod, ...] = get_args(QuantizationMethod)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-like decoder, read from a Hugging Face `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Raises ModelNotFoundError without config.json, UnsupportedModelError for its content."""
        raw = _read_json(directory / "config.json")
        if raw is None:
            raise ModelNotFoundError(f"{directory} holds no config.json")
        generation = _read_json(directory / "generation_config.json") or {}
        return cls.from_dict(raw, generation)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """Reads the fields of a `config.json` and of a `generation_config.json`."""
        architecture = (raw.get("architectures") or ["none"])[0]
        _require_supported(architecture, raw)
        missing = [name for name in _REQUIRED_KEYS if name not in raw]
        if missing:
            raise UnsupportedModelError(f"config.json lacks {', '.join(missing)}")
        eos = generation.get("eos_token_id", raw.get("eos_token_id"))
        return cls(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(_rope_parameters(raw).get("rope_theta", 10_000.0)),
            max_position_embeddings=raw["max_position_embeddings"],
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the decoder, a tied head counted once."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        vocabularies = 1 if self.tie_word_embeddings else 2
        embeddings = vocabularies * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    def weight_bytes(
        self, dtype: torch.dtype, quantization: QuantizationMethod | None = None
    ) -> int:
        """Memory of the weights on all ranks together, of which matrices may be quantized."""
        if quantization is None:
            return self.num_parameters * dtype.itemsize
        vocabulary = self.vocab_size * self.hidden_size
        # A tied embedding shares its table with the head only while that is not quantized.
        table = vocabulary if self.tie_word_embeddings else 0
        rest = self.num_parameters - self._num_matrix_elements + table
        return self._num_matrix_elements + rest * dtype.itemsize

    @property
    def _num_matrix_elements(self) -> int:
        """Weights of linear layers and the output head: what a quantization applies to."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def kv_bytes_per_token(self, dtype: torch.dtype, tensor_parallel_size: int = 1) -> int:
        """Keys and values of one token over all layers, on all ranks together.

        More ranks than KV heads hold one each, some of them twice.
        """
        num_kv_heads = max(self.num_kv_heads, tensor_parallel_size)
        return 2 * self.num_layers * num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class SpeculativeConfig:
    """How the service drafts when a request does not say.

    num_speculative_tokens: draft tokens a step and sequence.
    prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that `ngram` looks up, longest
        first.
    """

    method: SpeculationMethod = "ngram"
    num_speculative_tokens: int = 3
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        if self.method not in SPECULATION_METHODS:
            limit = f"one of {', '.join(SPECULATION_METHODS)}"
            raise InvalidValueError("speculative_config.method", self.method, limit)
        require_range(
            "speculative_config.num_speculative_tokens",
            self.num_speculative_tokens,
            1,
            MAX_NUM_SPECULATIVE_TOKENS,
        )
        require_range("speculative_config.prompt_lookup_min", self.prompt_lookup_min, 1, 16)
        require_range(
            "speculative_config.prompt_lookup_max",
            self.prompt_lookup_max,
            self.prompt_lookup_min,
            16,
        )


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    max_model_len: most tokens of a sequence, prompt and output together.
    block_size: tokens in a KV block. num_blocks: KV blocks in the pool.
    max_num_seqs: most sequences that run at once.
    max_num_batched_tokens: most tokens of one forward pass; bounds how long a prefill chunk can
        hold up the sequences that are decoding.
    max_queue_len: most sequences that wait beyond max_num_seqs; one more is refused.
    """

    max_model_len: int
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_queue_len: int = 256
    speculation: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        require_range("max_model_len", self.max_model_len, 1, 2**24)
        require_range("block_size", self.block_size, 1, 1024)
        require_range("max_num_seqs", self.max_num_seqs, 1, 4096)
        require_range("max_queue_len", self.max_queue_len, 0, 1_000_000)
        # Every running sequence must be able to decode in every step.
        require_range(
            "max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs, 2**20
        )
        blocks_of_longest = -(-self.max_model_len // self.block_size)
        require_range("num_blocks", self.num_blocks, blocks_of_longest, 2**31)


def require_range(name: str, value: int, low: int, high: int) -> None:
    """Raises InvalidValueError unless low <= value <= high."""
    if not low <= value <= high:
        raise InvalidValueError(name, value, f"from {low} to {high}")


def require_quantization(method: str | None) -> None:
    """Raises InvalidValueError for a method that there is not, or not on this processor."""
    if method is not None and method not in QUANTIZATION_METHODS:
        limit = f"one of {', '.join(QUANTIZATION_METHODS)}, or left out"
        raise InvalidValueError("quantization", method, limit)
    if method is not None and not _has_fbgemm():
        limit = "left out: it needs FBGEMM, which this processor's build of torch lacks"
        raise InvalidValueError("quantization", method, limit)


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _require_supported(architecture: str, raw: Mapping[str, Any]) -> None:
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UnsupportedModelError(f"{architecture} is not supported; supported: {supported}")
    rope_type = _rope_parameters(raw).get("rope_type", "default")
    unsupported = {
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        f"rope type {rope_type}": rope_type != "default",
        f"activation {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
    }
    weight_format(raw.get("quantization_config"))
    found = [feature for feature, is_used in unsupported.items() if is_used]
    if found:
        raise UnsupportedModelError(f"{architecture} with {', '.join(found)} is not supported")


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` since transformers 5; before it rope_theta and rope_scaling."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if "rope_theta" in raw:
        scaling.setdefault("rope_theta", raw["rope_theta"])
    scaling.setdefault("rope_type", scaling.get("type", "default"))
    return scaling


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} is no JSON object")
    return content
