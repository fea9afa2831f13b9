"""What vLLM calls the settings of an engine: which of it is the same here, and which is not.

Names have underscores; a flag has dashes instead. What is in no table and is no setting of ours is
refused as unknown. Source: the arguments of `vllm serve` and `vllm.LLM`, of version 0.6 (the
`speculative_*` ones) to 0.33. `draft_model`, `speculative_ratio`, `speculative_sampling` and
`speculative_decoding` are in texts about it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dtype": {"half": "float16", "float": "float32"},
        "generation_config": {"vllm": "none"},
        "spec_decoding_acceptance_method": {
            "rejection_sampler": "rejection",
            "typical_acceptance_sampler": "typical",
        },
    }
)
"""Values under another name, by setting."""

_BY_CHECKPOINT = "left out: a checkpoint that is quantized says so itself"

REFUSED_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "quantization": dict.fromkeys(
            ("awq", "awq_marlin", "gptq", "gptq_marlin", "fp8"), _BY_CHECKPOINT
        ),
    }
)
"""Values that somebody who knows vLLM may give, and what to give instead."""


class Always(NamedTuple):
    """A setting of vLLM that can have one value here. reason: why, or what is done.

    synonyms: values that ask for the same.
    """

    value: bool | int | str
    reason: str
    synonyms: tuple[str, ...] = ()


ALWAYS: Mapping[str, Always] = MappingProxyType(
    {
        "cpu_offload_gb": Always(0, "a model is held whole where it runs"),
        "data_parallel_size": Always(1, "a service has num_replicas instead"),
        "enable_chunked_prefill": Always(True, "long prompts are computed in chunks"),
        "enforce_eager": Always(True, "no CUDA graphs are captured"),
        "kv_cache_dtype": Always("auto", "the KV cache is held in dtype"),
        "load_format": Always("auto", "what a model's files are is seen by them", ("safetensors",)),
        "pipeline_parallel_size": Always(1, "tensor_parallel_size alone divides a model"),
        "preemption_mode": Always("recompute", "what is preempted is computed again"),
        "runner": Always("generate", "models generate text", ("auto",)),
        "scheduling_policy": Always("priority", "requests go by their priority, then by arrival"),
        "skip_tokenizer_init": Always(False, "text is told; prompts may be token ids anyway"),
        "task": Always("generate", "models generate text", ("auto",)),
        "tokenizer_mode": Always("auto", "a model's files say how to tokenize"),
        "trust_remote_code": Always(False, "no code that comes with a model is run"),
        "use_v2_block_manager": Always(True, "there is one block manager"),
    }
)
"""Settings that may be given, with the one value that is so anyway."""

_ONE_ADAPTER = "left out: adapters are not loaded; merge one into its model"
_GRAPHS = "left out: no CUDA graphs are captured"
_TEXT_ONLY = "left out: the models read text only"

NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "attention_backend": "given as kernels",
        "calculate_kv_scales": "left out: the KV cache is held in dtype",
        "chat_template": "left out: the model's own template is used",
        "code_revision": "left out: no code that comes with a model is run",
        "compilation_config": _GRAPHS,
        "cuda_graph_sizes": _GRAPHS,
        "disable_custom_all_reduce": "left out: how ranks reduce follows from where they are",
        "disable_sliding_window": "left out: a model's windows are part of it",
        "download_dir": "given as $HF_HOME for models of the Hub, else $SPECDEC_CACHE_DIR",
        "draft_model": "given as model in speculative_config",
        "enable_expert_parallel": "left out: no models with experts are supported",
        "enable_lora": _ONE_ADAPTER,
        "guided_decoding_backend": "left out: there is one, llguidance",
        "hf_config_path": "left out: a model and its config.json are in one place",
        "hf_overrides": "left out: change the model's config.json",
        "hf_token": "given as $HF_TOKEN",
        "kv_transfer_config": "left out: KV is not passed between instances",
        "limit_mm_per_prompt": _TEXT_ONLY,
        "lora_modules": _ONE_ADAPTER,
        "max_cpu_loras": _ONE_ADAPTER,
        "max_logprobs": "left out: it is 20",
        "max_lora_rank": _ONE_ADAPTER,
        "max_loras": _ONE_ADAPTER,
        "max_num_partial_prefills": "given as max_prefill_tokens",
        "max_parallel_loading_workers": "left out: ranks load at once, each its own part",
        "max_seq_len_to_capture": _GRAPHS,
        "mm_processor_kwargs": _TEXT_ONLY,
        "model_impl": "given as kernels",
        "num_gpu_blocks_override": "given as kv_cache_memory_gib",
        "num_lookahead_slots": "left out: drafts have room as they need it",
        "num_scheduler_steps": "left out: each step is scheduled",
        "optimization_level": _GRAPHS,
        "override_generation_config": "left out: change the model's generation_config.json",
        "quantization_param_path": "left out: the KV cache is held in dtype",
        "scheduler_delay_factor": "left out: a request begins as soon as there is room",
        "speculative_decoding": "given as speculative_config; none turns it off",
        "speculative_disable_mqa_scorer": "left out: drafts are scored in one pass",
        "speculative_ratio": "given as num_speculative_tokens, how many tokens to draft",
        "speculative_sampling": "given as speculative_config; none turns it off",
        "swap_space": "left out: what is preempted is computed again, not swapped",
        "tokenizer_revision": "left out: the tokenizer comes with the model",
    }
)
"""Settings that have no meaning here, or one that needs a thought: what they must be."""


@dataclass(frozen=True)
class Words:
    """The tables of one surface: those above, with what only it has. renamed: to our names."""

    renamed: Mapping[str, str]
    always: Mapping[str, Always]
    not_here: Mapping[str, str]


IN_PROCESS = Words({}, ALWAYS, NOT_HERE)
"""Of `LLM` and `AsyncLLM`; what they take beyond a service is in `specdec.llm.arguments`."""
