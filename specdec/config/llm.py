"""Settings of the model, the engine and speculation, shared by `specdec.LLM` and the service.

Each setting declares its limits, default and description once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
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
from specdec.config.hardware import has_triton_package, resolved_device
from specdec.config.hf_overrides import HF_OVERRIDES, canonical_overrides
from specdec.config.kv_cache import KV_CACHE_DTYPES, KVCacheDType
from specdec.config.llm_checks import check_together
from specdec.config.quantization import (
    CHECKPOINT_QUANTIZATIONS,
    QUANTIZATION_METHODS,
    CheckpointQuantization,
    QuantizationMethod,
)
from specdec.config.speculative_keys import AUTO, SPECULATION, default_speculation, read_speculation
from specdec.types.errors import InvalidValueError

if TYPE_CHECKING:
    from specdec.config.engine import AdapterLimits, DTypeName, ModelOptions
    from specdec.config.speculation.head_methods import HeadMethodConfig
    from specdec.config.speculation.methods import DraftModelConfig
    from specdec.config.speculation.speculative import SpeculativeConfig
    from specdec.types.adapters import AdapterOrder

Config = TypeVar("Config", bound="LLMConfig")

_CPU_PREFILL_TOKENS = 64
"""The chunk size with the best prefill throughput on a CPU: SmolLM2 in float32 on one thread takes
2.2 ms a token in chunks of 64, 2.5 ms in chunks of 32 and 2.6 ms in chunks of 256. A larger chunk
also delays the requests that decode."""

_DEFAULTS_BY_DEVICE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cpu": {"dtype": "float32", "max_num_seqs": 64, "max_num_batched_tokens": 256},
        "cuda": {"dtype": "auto", "max_num_seqs": 256, "max_num_batched_tokens": 2048},
    }
)
"""Those of a GPU are vLLM's: its arithmetic is idle with fewer rows."""


_DEFAULT_LOADED_ADAPTERS = 8


@dataclass(frozen=True)
class LLMConfig:
    """Configuration of a model and its engine, validated when it is created.

    Raises InvalidValueError, which names field, value and limit.
    """

    model: str = setting(
        "smollm2-135m-instruct",
        TEXT,
        "Model to serve: an alias, a directory, a GGUF file, or a Hugging Face Hub id such as "
        "org/name or org/name@revision",
    )
    tensor_parallel_size: int = setting(
        1, whole_number(1, 1024), "Number of tensor parallel ranks to split the model across"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        None,  # here and below: `_DEFAULTS_BY_DEVICE`
        optional(one_of("auto", "float32", "bfloat16", "float16")),
        "Data type of weights, activations and KV cache; auto uses torch_dtype of the model's "
        "config.json, or float32 if it has none; on a GPU bfloat16 in place of float32",
        "float32 on a CPU, auto on a GPU",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "cpu",
        one_of("auto", "cpu", "cuda"),
        "Device to run the models on; cuda assigns one GPU to each rank, but one to a target and a "
        "draft model that share it; auto uses cuda if torch finds a GPU",
    )
    gpu_memory_utilization: float = setting(
        0.9, SHARE, "Fraction of each GPU's memory to use for weights and KV cache"
    )
    quantization: Literal["none", QuantizationMethod, CheckpointQuantization] = setting(
        "none",
        one_of("none", *QUANTIZATION_METHODS, *CHECKPOINT_QUANTIZATIONS),
        "Quantization of the weight matrices, which changes the model's output: int8 uses 8-bit "
        "weights; w8a8 on a CPU also uses 8-bit activations, is faster with long prompts and large "
        "batches, and needs native kernels; int4 uses 4-bit weights on a GPU. The other names "
        "require a checkpoint in that format, which is detected in any case, kept as it is where "
        "a GPU has kernels for it, and dequantized elsewhere",
    )
    kernels: Literal["auto", "native", "triton", "torch"] = setting(
        "auto",
        one_of("auto", "native", "triton", "torch"),
        "Implementation of the kernels: native is C++ for CPUs, compiled in the wheel or on first "
        "use; triton is for GPUs; torch is PyTorch; auto selects native on a CPU and triton on a "
        "GPU if available, else torch",
    )
    model_impl: Literal["auto", "specdec", "transformers"] = setting(
        "auto",
        one_of("auto", "specdec", "transformers"),
        "Implementation of the model: specdec is this project's decoder, transformers is "
        "transformers' modelling code over specdec's KV cache, auto uses it for architectures that "
        "specdec's decoder does not have",
    )
    hf_overrides: str | None = setting(
        None,
        HF_OVERRIDES,
        "JSON object whose keys replace those of the model's config.json",
        "none",
    )
    enable_expert_parallel: bool = setting(
        False,
        BOOLEAN,
        "Divide a mixture of experts over the ranks by expert, whole experts on each, instead of "
        "by the hidden units of every expert",
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        one_of("auto", "none"),
        "Source of the default sampling parameters: auto reads the model's generation_config.json, "
        "none uses neutral values",
    )
    max_model_len: int | None = setting(
        None,
        optional(whole_number(2, 2**24)),
        "Maximum context length: tokens of the prompt and the output together",
        "the model's",
    )
    max_num_seqs: int = setting(
        None,
        optional(whole_number(1, 4096)),
        "Maximum number of sequences that run concurrently",
        "64 on a CPU, 256 on a GPU",
    )
    max_num_batched_tokens: int = setting(
        None,
        optional(whole_number(1, 2**20)),
        "Maximum number of tokens in one forward pass; at least max_num_seqs",
        "256 on a CPU, 2048 on a GPU",
    )
    max_prefill_tokens: int | None = setting(
        None,
        optional(whole_number(1, 2**20)),
        "Maximum number of prompt tokens in a forward pass that also decodes; smaller prefill "
        "chunks delay decoding requests less",
        "64 on a CPU; on a GPU limited by max_num_batched_tokens alone",
    )
    block_size: int = setting(
        16, whole_number(1, 1024), "Number of tokens in a block of the KV cache"
    )
    max_queue_len: int = setting(
        256, whole_number(0, 1_000_000), "Maximum number of waiting requests; more are rejected"
    )
    enable_prefix_caching: bool = setting(
        True, BOOLEAN, "Reuse the KV cache of a prompt prefix that was computed before"
    )
    stream_interval: int = setting(
        1,
        whole_number(1, 2**20),
        "Number of tokens to buffer before a streaming message is sent, unless the request "
        "specifies it; the first and the last token are sent immediately, and the second message "
        "may be sent early",
    )
    async_scheduling: bool = setting(
        True,
        BOOLEAN,
        "Schedule the next step while the current one runs. This requires that a draft head on the "
        "target's ranks makes the drafts, that the current step has none and those of the next "
        "step do not depend on its tokens, or that method `suffix` guesses its result, where that "
        "is measured to pay. If a sequence stops, its scheduled step is discarded",
    )
    enable_lora: bool = setting(
        False, BOOLEAN, "Allow LoRA adapters, which requests select by name; docs/lora.md"
    )
    max_loras: int = setting(
        1,
        whole_number(1, 4096),
        "Maximum number of different LoRA adapters in a batch; requests for others wait",
    )
    max_lora_rank: int = setting(
        16, whole_number(1, 512), "Maximum rank of a LoRA adapter; memory is reserved for it"
    )
    max_cpu_loras: int | None = setting(
        None,
        optional(whole_number(1, 4096)),
        "Maximum number of loaded LoRA adapters; at least max_loras",
        "the largest of max_loras, the number of lora_modules, and 8",
    )
    enforce_eager: bool = setting(
        False,
        BOOLEAN,
        "On a GPU, launch the operators of each step one by one, without CUDA graphs: the start is "
        "faster and the graphs take no memory, but steps are slower; a CPU has none",
    )
    deterministic: bool = setting(
        False,
        BOOLEAN,
        "Return the same tokens for a prompt, parameters and seed whatever else is in the batch; "
        "on a GPU matrix products are slower, and Triton's kernels, RMSNorm and no adapters are "
        "required; a CPU with native kernels always does",
    )
    disable_custom_all_reduce: bool = setting(
        False,
        BOOLEAN,
        "Sum over the ranks on GPUs by NCCL alone; otherwise small sums are one kernel over "
        "memory that the GPUs share, where NVLink joins them and torch supports it",
    )
    compare_ranks: bool = setting(
        False,
        BOOLEAN,
        "Compare the tokens and drafts of all ranks in each step, and end the ranks with an error "
        "that names rank, sequence and position where they differ; for debugging, as ranks then "
        "wait for each other's hosts",
    )
    kv_cache_dtype: KVCacheDType = setting(
        "auto",
        one_of(*KV_CACHE_DTYPES),
        "Data type of the KV caches of target and draft model: auto is dtype; fp8 (fp8_e4m3) and "
        "fp8_e5m2 hold twice as many tokens as 16 bits and change the model's output; scales of "
        "keys and values are those of the checkpoint, or 1; not with the native kernels of CPUs",
    )
    kv_cache_memory_gib: float | None = setting(
        None,
        optional(POSITIVE),
        "Size of the KV cache in GiB, over all ranks",
        "computed from free memory",
    )
    speculative_config: SpeculativeConfig | None = setting(
        AUTO,  # depends on the model
        SPECULATION,
        'Speculative decoding configuration as JSON, such as {"method": "ngram", '
        '"num_speculative_tokens": 3}, or none to disable speculation; '
        "docs/methods.md lists the keys",
        "auto: for an alias, the fastest of its drafters, measured on this machine; ngram for "
        "other models",
    )

    def __post_init__(self) -> None:
        is_auto = isinstance(self.speculative_config, str)
        if HF_OVERRIDES.accepts(self.hf_overrides):
            object.__setattr__(self, "hf_overrides", canonical_overrides(self.hf_overrides))
        for key, known in self.settings().items():
            value = getattr(self, key)
            if not (known.limit.accepts(value) or (key == "speculative_config" and is_auto)):
                raise InvalidValueError(key, value, known.limit.text)
        device = resolved_device(self.device)
        object.__setattr__(self, "device", device)
        self._set_defaults_of_device()
        if is_auto:
            default = default_speculation(self.model, device)
            object.__setattr__(self, "speculative_config", default)
        self._check_together()

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Return every setting by name, in the order of the fields."""
        return {each.name: each.metadata["setting"] for each in fields(cls)}

    @classmethod
    def from_mapping(cls: type[Config], mapping: Mapping[str, Any]) -> Config:
        """Create a configuration from plain data, such as the result of `to_mapping`.

        `speculative_config` may also be JSON text. Paths become absolute, so that they stay valid
        in a process with another working directory. Raises InvalidValueError, also for an unknown
        key, with the nearest known one.
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
        """`dtype` of a configuration whose auto was resolved by `with_resolved_dtype`."""
        assert self.dtype != "auto", "dtype auto is not resolved yet"
        return self.dtype

    @property
    def quantization_method(self) -> QuantizationMethod | None:
        """`quantization` as the loader expects it."""
        return self.quantization if self.quantization in QUANTIZATION_METHODS else None

    @property
    def wants_triton(self) -> bool:
        """Return whether Triton's kernels run where its package is present."""
        return self.kernels == "triton" or (self.device == "cuda" and self.kernels == "auto")

    @property
    def keeps_stored_weights(self) -> bool:
        """Return whether quantized checkpoints stay in few bits, for Triton's kernels on a GPU."""
        return self.device == "cuda" and self.kernels in ("auto", "triton") and has_triton_package()

    @property
    def draft_model(self) -> DraftModelConfig | None:
        """The part of speculative_config about a draft model; None without one."""
        speculation = self.speculative_config
        return None if speculation is None else speculation.draft_model

    @property
    def shares_gpu(self) -> bool:
        """Return whether the ranks of target and draft model share a GPU."""
        return self.draft_model is not None and bool(self.draft_model.share_gpu)

    @property
    def num_spare_ranks(self) -> int:
        """Number of processes that wait to replace a draft rank; only a service has some."""
        return 0

    @property
    def head(self) -> HeadMethodConfig | None:
        """The part of speculative_config about a draft head; None without one."""
        speculation = self.speculative_config
        return None if speculation is None else speculation.head

    @property
    def model_options(self) -> ModelOptions:
        """How the ranks read and divide the target."""
        from specdec.config.engine import ModelOptions

        return ModelOptions(
            self.model_impl,
            self.enable_expert_parallel,
            self.hf_overrides,
            has_defaults=self.generation_config == "auto",
        )

    @property
    def prefill_limit(self) -> int | None:
        """`max_prefill_tokens`, or the default of the device."""
        if self.max_prefill_tokens is None and self.device == "cpu":
            return _CPU_PREFILL_TOKENS
        return self.max_prefill_tokens

    @property
    def request_name(self) -> str:
        """Name of the model in requests."""
        return self.model

    @property
    def startup_adapters(self) -> tuple[AdapterOrder, ...]:
        """Adapters to load before the first request; only a service configures some."""
        return ()

    @property
    def adapter_limits(self) -> AdapterLimits | None:
        """Limits of LoRA adapters; None where they are not enabled."""
        if not self.enable_lora:
            return None
        from specdec.config.engine import AdapterLimits

        default = max(self.max_loras, len(self.startup_adapters), _DEFAULT_LOADED_ADAPTERS)
        return AdapterLimits(self.max_loras, self.max_lora_rank, self.max_cpu_loras or default)

    def _set_defaults_of_device(self) -> None:
        for name, default in _DEFAULTS_BY_DEVICE[self.device].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    def _check_together(self) -> None:
        self._check_adapters()
        check_together(self)

    def _check_adapters(self) -> None:
        limits = self.adapter_limits
        if limits is not None and limits.max_loaded < limits.max_loras:
            limit = f"at least max_loras ({limits.max_loras})"
            raise InvalidValueError("max_cpu_loras", self.max_cpu_loras, limit)
