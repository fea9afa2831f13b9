"""Configuration of a model and its engine, shared by the service and `specdec.LLM`.

Each setting declares its limits, default and meaning once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from specdec.config.fields import (
    BOOLEAN,
    DIRECTORY,
    FILE,
    POSITIVE,
    SHARE,
    TEXT,
    Setting,
    one_of,
    optional,
    refuse_unknown,
    setting,
    whole_number,
)
from specdec.config.hardware import resolved_device
from specdec.config.speculative_keys import AUTO, SPECULATION, default_speculation, read_speculation
from specdec.types.errors import InvalidValueError

if TYPE_CHECKING:
    from specdec.config.engine import DTypeName
    from specdec.config.methods import DraftModelConfig
    from specdec.config.quantization import QuantizationMethod
    from specdec.config.speculative import SpeculativeConfig

Config = TypeVar("Config", bound="LLMConfig")

_CPU_PREFILL_TOKENS = 64
"""Enough for a CPU's best throughput: SmolLM2 in float32 on one thread takes 2.2 ms a token in a
chunk of 64, 2.5 ms in one of 32 and 2.6 ms in one of 256. Decoding requests wait for the chunk."""


@dataclass(frozen=True)
class LLMConfig:
    """A model, and how an engine runs it. Validated however it is made.

    Raises InvalidValueError, which names field, value and limit.
    """

    model: str = setting(
        "smollm2-135m-instruct",
        TEXT,
        "Model to serve, as an alias, a directory, a GGUF file, or a Hugging Face Hub id such as "
        "org/name or org/name@revision",
    )
    tensor_parallel_size: int = setting(1, whole_number(1, 1024), "Shards to divide the model into")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "float32",
        one_of("auto", "float32", "bfloat16", "float16"),
        "Data type of weights, activations and KV cache; auto is the one that config.json of "
        "the model names, or float32 where it names none",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "cpu",
        one_of("auto", "cpu", "cuda"),
        "Device of the models: cuda gives each rank its own GPU, auto is cuda where torch finds a "
        "GPU, else cpu",
    )
    gpu_memory_utilization: float = setting(
        0.9, SHARE, "Share of each GPU's memory to take for weights and KV cache"
    )
    quantization: Literal["none", "int8", "w8a8"] = setting(
        "none",
        one_of("none", "int8", "w8a8"),
        "Quantization of the matrices, which changes the model's output: int8 has 8-bit weights, "
        "w8a8 also 8-bit activations, which is faster with long prompts and many requests, and "
        "needs native kernels",
    )
    kernels: Literal["auto", "native", "torch"] = setting(
        "auto",
        one_of("auto", "native", "torch"),
        "CPU kernels: native compiles this project's C++ kernels at first use, auto takes them if "
        "there is a compiler, else those of torch",
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        one_of("auto", "none"),
        "Defaults of sampling parameters that a request leaves out: those of the model's "
        "generation_config.json with auto, neutral values with none",
    )
    max_model_len: int | None = setting(
        None,
        optional(whole_number(2, 2**24)),
        "Most tokens of a prompt and its completion together",
        "the model's",
    )
    max_num_seqs: int = setting(64, whole_number(1, 4096), "Most requests that run at once")
    max_num_batched_tokens: int = setting(
        256,
        whole_number(1, 2**20),
        "Most tokens of one forward pass, no fewer than max_num_seqs",
    )
    max_prefill_tokens: int | None = setting(
        None,
        optional(whole_number(1, 2**20)),
        "Most prompt tokens of a forward pass in which other requests decode, which wait for it",
        "64 on a CPU; on a GPU as many as max_num_batched_tokens leaves room for",
    )
    block_size: int = setting(16, whole_number(1, 1024), "Tokens in a block of the KV cache")
    max_queue_len: int = setting(
        256, whole_number(0, 1_000_000), "Most requests that wait; one more is rejected"
    )
    enable_prefix_caching: bool = setting(
        True, BOOLEAN, "Whether the KV cache of equal prompt prefixes is reused"
    )
    stream_interval: int = setting(
        1,
        whole_number(1, 2**20),
        "Number of new tokens that are sent together in a stream, unless a request chooses; the "
        "first and the last message do not wait, and the second may be shorter",
    )
    async_scheduling: bool = setting(
        True,
        BOOLEAN,
        "Whether the target receives its next step before the tokens of the running one are known, "
        "while nothing is drafted; after the end of an output one step is discarded",
    )
    kv_cache_memory_gib: float | None = setting(
        None,
        optional(POSITIVE),
        "Memory for the KV cache, in GiB over all shards",
        "decided from free memory",
    )
    speculative_config: SpeculativeConfig | None = setting(
        AUTO,  # depends on the model
        SPECULATION,
        'How to draft, such as {"method": "ngram", "num_speculative_tokens": 3}, or none',
        "auto, an int8 copy of an alias's model, and ngram for other and for quantized models",
    )

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, str):  # AUTO
            device = resolved_device(self.device)
            default = default_speculation(self.model, device, self.quantization)
            object.__setattr__(self, "speculative_config", default)
        for key, known in self.settings().items():
            value = getattr(self, key)
            if not known.limit.accepts(value):
                raise InvalidValueError(key, value, known.limit.text)
        object.__setattr__(self, "device", resolved_device(self.device))
        self._check_together()

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Return every setting by name, in the order of documentation."""
        return {each.name: each.metadata["setting"] for each in fields(cls)}

    @classmethod
    def from_mapping(cls: type[Config], mapping: Mapping[str, Any]) -> Config:
        """Read plain data, such as `to_mapping` makes; `speculative_config` may be JSON text too.

        Paths become absolute, since another process may have another working directory.
        Raises InvalidValueError, also for an unknown key, with the nearest known one.
        """
        refuse_unknown("configuration key", mapping, cls.settings())
        values = dict(mapping)
        if "speculative_config" in values:
            values["speculative_config"] = read_speculation(values["speculative_config"])
        for name, known in cls.settings().items():
            if known.limit in (FILE, DIRECTORY) and isinstance(values.get(name), str):
                values[name] = Path(values[name]).absolute()
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """Return all settings as plain data, to send to another process."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.speculative_config is not None:
            values["speculative_config"] = self.speculative_config.to_mapping()
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }

    @property
    def resolved_dtype(self) -> DTypeName:
        """`dtype`, after `with_resolved_dtype` has resolved auto."""
        assert self.dtype != "auto", "dtype auto is not resolved"
        return self.dtype

    @property
    def quantization_method(self) -> QuantizationMethod | None:
        """`quantization`; None for none."""
        return None if self.quantization == "none" else self.quantization

    @property
    def draft_model(self) -> DraftModelConfig | None:
        """The part of speculative_config about a draft model; None without one."""
        speculation = self.speculative_config
        return None if speculation is None else speculation.draft_model

    @property
    def prefill_limit(self) -> int | None:
        """`max_prefill_tokens`, or its default on the device."""
        if self.max_prefill_tokens is None and self.device == "cpu":
            return _CPU_PREFILL_TOKENS
        return self.max_prefill_tokens

    def _check_together(self) -> None:
        if self.device != "cpu":
            limit = f"left out where device is {self.device}: it runs on a CPU"
            self._refuse_quantization(limit, "int8", "w8a8")
            if self.kernels == "native":
                limit = f"auto or torch where device is {self.device}: they run on a CPU"
                raise InvalidValueError("kernels", self.kernels, limit)
        if self.kernels == "torch":
            limit = "left out or int8 where kernels is torch: w8a8 needs native kernels"
            self._refuse_quantization(limit, "w8a8")
        if self.max_num_batched_tokens < self.max_num_seqs:
            limit = f"at least max_num_seqs ({self.max_num_seqs}), so that all can decode in a step"
            raise InvalidValueError("max_num_batched_tokens", self.max_num_batched_tokens, limit)

    def _refuse_quantization(self, limit: str, *methods: QuantizationMethod) -> None:
        of_draft = None if self.draft_model is None else self.draft_model.quantization
        if self.quantization in methods:
            raise InvalidValueError("quantization", self.quantization, limit)
        if of_draft in methods:
            raise InvalidValueError("speculative_config.quantization", of_draft, limit)
