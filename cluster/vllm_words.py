"""What vLLM calls things that a service is told: which of it is the same here, and which is not.

Names are those of settings, with underscores; a flag has dashes instead. What is in no table and is
no setting of ours is refused as unknown. Source: the arguments of `vllm serve`, of version 0.6 (the
`speculative_*` flags) to 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

SAME = (
    *("model", "served_model_name", "dtype", "quantization", "device", "generation_config"),
    *("tensor_parallel_size", "gpu_memory_utilization", "block_size", "enable_prefix_caching"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "stream_interval"),
    *("speculative_config", "host", "otlp_traces_endpoint", "tool_call_parser"),
)
"""Settings of the same meaning under the same name."""

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "port": "http_port",
        "ssl_certfile": "tls_cert_file",
        "ssl_keyfile": "tls_key_file",
    }
)
"""Settings of the same meaning under another name."""

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
        "dtype": {"auto": "one of float32, bfloat16, float16: that of a checkpoint is not asked"},
        "quantization": dict.fromkeys(
            ("awq", "awq_marlin", "gptq", "gptq_marlin", "fp8"), _BY_CHECKPOINT
        ),
    }
)
"""Values that somebody who knows vLLM may give, and what to give instead."""


class Always(NamedTuple):
    """A setting of vLLM that can have one value here. reason: why, or what is done."""

    value: bool | int | str
    reason: str


ALWAYS: Mapping[str, Always] = MappingProxyType(
    {
        "disable_log_requests": Always(True, "requests are logged with --log-level info alone"),
        "disable_log_stats": Always(False, "statistics are kept, for /metrics"),
        "disable_uvicorn_access_log": Always(True, "there is no access log"),
        "distributed_executor_backend": Always("ray", "ranks are actors of Ray"),
        "enable_auto_tool_choice": Always(True, "a request decides, by its tool_choice"),
        "enable_chunked_prefill": Always(True, "long prompts are computed in chunks"),
        "enable_log_requests": Always(False, "requests are logged with --log-level info alone"),
        "enable_prompt_tokens_details": Always(True, "the usage tells of cached tokens"),
        "enable_request_id_headers": Always(True, "answers have X-Request-Id"),
        "enforce_eager": Always(True, "no CUDA graphs are captured"),
        "kv_cache_dtype": Always("auto", "the KV cache is held in dtype"),
        "load_format": Always("auto", "what a model's files are is seen by them"),
        "pipeline_parallel_size": Always(1, "tensor_parallel_size alone divides a model"),
        "preemption_mode": Always("recompute", "what is preempted is computed again"),
        "scheduling_policy": Always("priority", "requests go by their priority, then by arrival"),
        "tokenizer_mode": Always("auto", "a model's files say how to tokenize"),
        "trust_remote_code": Always(False, "no code that comes with a model is run"),
    }
)
"""Settings that may be given, with the one value that is so anyway."""

_ONE_ADAPTER = "left out: adapters are not loaded; merge one into its model"
_GRAPHS = "left out: no CUDA graphs are captured"
_TEXT_ONLY = "left out: the models read text only"
_BY_REPLICA = "given as num_replicas or max_replicas, with ingress serve"
_NO_ORIGINS = "left out: pages of other sites may not call the service"

NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "allowed_origins": _NO_ORIGINS,
        "allowed_methods": _NO_ORIGINS,
        "allowed_headers": _NO_ORIGINS,
        "allow_credentials": _NO_ORIGINS,
        "api_server_count": _BY_REPLICA,
        "async_scheduling": "left out: there is one scheduler",
        "attention_backend": "given as kernels",
        "calculate_kv_scales": "left out: the KV cache is held in dtype",
        "chat_template": "left out: the model's own template is used",
        "code_revision": "left out: no code that comes with a model is run",
        "compilation_config": _GRAPHS,
        "cpu_offload_gb": "left out: a model is held whole where it runs",
        "cuda_graph_sizes": _GRAPHS,
        "data_parallel_size": _BY_REPLICA,
        "disable_custom_all_reduce": "left out: how ranks reduce follows from where they are",
        "disable_sliding_window": "left out: a model's windows are part of it",
        "download_dir": "given as $SPECDEC_CACHE_DIR, where models are kept",
        "enable_expert_parallel": "left out: no models with experts are supported",
        "enable_lora": _ONE_ADAPTER,
        "lora_modules": _ONE_ADAPTER,
        "max_loras": _ONE_ADAPTER,
        "max_lora_rank": _ONE_ADAPTER,
        "guided_decoding_backend": "left out: there is one, llguidance",
        "hf_config_path": "left out: a model and its config.json are in one place",
        "hf_overrides": "left out: change the model's config.json",
        "hf_token": "given as $HF_TOKEN",
        "kv_cache_memory_bytes": "given as kv_cache_memory_gib, in GiB",
        "kv_transfer_config": "left out: KV is not passed between instances",
        "limit_mm_per_prompt": _TEXT_ONLY,
        "max_cpu_loras": _ONE_ADAPTER,
        "max_log_len": "left out: no text of a request is logged",
        "max_logprobs": "left out: it is 20",
        "max_num_partial_prefills": "given as max_prefill_tokens",
        "max_parallel_loading_workers": "left out: ranks load at once, each its own part",
        "max_seq_len_to_capture": _GRAPHS,
        "middleware": "left out: put a proxy before the service",
        "mm_processor_kwargs": _TEXT_ONLY,
        "model_impl": "given as kernels",
        "num_gpu_blocks_override": "given as kv_cache_memory_gib",
        "num_lookahead_slots": "left out: drafts have room as they need it",
        "num_scheduler_steps": "left out: each step is scheduled",
        "optimization_level": _GRAPHS,
        "override_generation_config": "left out: change the model's generation_config.json",
        "quantization_param_path": "left out: the KV cache is held in dtype",
        "reasoning_parser": "left out: thoughts stay in the text",
        "response_role": "left out: it is assistant",
        "revision": "left out: model takes it behind an @, as in org/name@revision",
        "root_path": "left out: have the proxy take its prefix away",
        "scheduler_delay_factor": "left out: a request begins as soon as there is room",
        "seed": "left out: each request has a seed, which its answer names",
        "skip_tokenizer_init": "left out: requests may bring token ids anyway",
        "speculative_disable_mqa_scorer": "left out: drafts are scored in one pass",
        "speculative_ratio": "given as num_speculative_tokens, how many tokens to draft",
        "speculative_sampling": "given as speculative_config; none turns it off",
        "ssl_ca_certs": "left out: callers are known by keys, not by certificates",
        "swap_space": "left out: what is preempted is computed again, not swapped",
        "task": "left out: models generate text",
        "tokenizer": "left out: a model and its tokenizer are in one place",
        "tokenizer_revision": "left out: model takes it behind an @, as in org/name@revision",
        "tool_parser_plugin": "left out: tool_call_parser names the formats there are",
        "uds": "left out: the service listens on ports",
        "uvicorn_log_level": "given as log_level",
        "worker_use_ray": "left out: ranks are actors of Ray",
    }
)
"""Settings that have no meaning here, or one that needs a thought: what they must be."""
