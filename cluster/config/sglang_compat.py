"""SGLang's names for the settings of a service: the flags of `sglang.launch_server`.

Names have underscores; a flag has dashes instead. The tables are used like those of
`cluster.config.vllm_compat`, and docs/migration.md is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specdec.config.vllm_compat import Always
from specdec.types.errors import InvalidValueError

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "model_path": "model",
        "tp_size": "tensor_parallel_size",
        "tp": "tensor_parallel_size",
        "context_length": "max_model_len",
        "max_running_requests": "max_num_seqs",
        "max_queued_requests": "max_queue_len",
        "chunked_prefill_size": "max_num_batched_tokens",
        "page_size": "block_size",
        "mem_fraction_static": "gpu_memory_utilization",
        "random_seed": "seed",
        "watchdog_timeout": "step_timeout_s",
        "tokenizer_worker_num": "frontends",
        "disable_cuda_graph": "enforce_eager",
    }
)
"""Our name by SGLang's, for settings with the same meaning."""

SPECULATION_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "speculative_algorithm": "method",
        "speculative_draft_model_path": "model",
        "speculative_num_steps": "num_speculative_tokens",
        "speculative_draft_model_quantization": "quantization",
        "speculative_draft_window_size": "draft_window",
    }
)
"""Keys of speculative_config by SGLang's flags. `speculative_token_map` has the same name."""

DISABLES: Mapping[str, str] = MappingProxyType({"disable_radix_cache": "enable_prefix_caching"})
"""Our setting, which is true by default, by SGLang's flag that turns it off."""

TREE_FLAGS = ("speculative_eagle_topk", "speculative_num_draft_tokens")
"""SGLang's flags that together describe a tree; see `in_our_words`."""

TREE_TOKENS = "num_draft_tree_tokens"
_STEPS = ("num_speculative_tokens", "spec_tokens", "speculative_num_steps")

ALWAYS: Mapping[str, Always] = MappingProxyType(
    {
        "attention_backend": Always(
            "auto", "the kernels are selected by the device", takes_any=True
        ),
        "cuda_graph_max_bs": Always(
            0, "CUDA graphs are for steps of up to max_num_seqs or 512 sequences", takes_any=True
        ),
        "enable_torch_compile": Always(True, "the kernels are compiled already", takes_any=True),
        "dp_size": Always(1, "set num_replicas instead"),
        "nnodes": Always(1, "the nodes are those of Ray; set target_placement to pack or spread"),
        "pp_size": Always(1, "pipeline parallelism is not supported; set tensor_parallel_size"),
        "enable_metrics": Always(True, "metrics are always available at /metrics"),
        "grammar_backend": Always(
            "llguidance", "llguidance compiles all grammars", ("xgrammar", "outlines")
        ),
        "schedule_policy": Always("fcfs", "requests run by priority, then by arrival", ("lpm",)),
        "skip_server_warmup": Always(True, "models warm up while they load"),
    }
)
"""Flags of SGLang that are accepted with the values that apply here."""


def in_our_words(source: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replace the flags of one source that are not plain renames.

    SGLang's number of draft tokens counts the token before the draft, too. With topk 1 the draft is
    a chain of one token fewer; with a higher topk it is a tree, whose depth is the number of steps.
    Raises InvalidValueError.
    """
    values: dict[Any, Any] = {}
    for key, value in source.items():
        name = _name(key)
        ours = DISABLES.get(name, name)
        if ours in values:
            raise InvalidValueError(key, value, f"left out where {ours} is given, too")
        values[ours] = not _boolean(name, value) if name in DISABLES else value
    topk, count = (values.pop(name, None) for name in TREE_FLAGS)
    if count is not None:
        given = (values[name] for name in _STEPS if name in values)
        steps = next(given, None)
        is_tree = topk is not None and _whole(TREE_FLAGS[0], topk) > 1
        values |= _draft(_whole(TREE_FLAGS[1], count), steps, is_tree=is_tree)
    elif topk is not None and _whole(TREE_FLAGS[0], topk) > 1:
        limit = "1, unless speculative_num_draft_tokens gives the size of the tree"
        raise InvalidValueError(TREE_FLAGS[0], topk, limit)
    return values


def _draft(count: int, steps: object, *, is_tree: bool) -> dict[str, int]:
    if count < 2:
        raise InvalidValueError(TREE_FLAGS[1], count, "at least 2: it counts the token before")
    if is_tree:
        return {TREE_TOKENS: count - 1}
    if steps is None:
        return {_STEPS[0]: count - 1}
    if steps != count - 1:
        limit = f"speculative_num_steps and one ({steps} + 1) where speculative_eagle_topk is 1"
        raise InvalidValueError(TREE_FLAGS[1], count, limit)
    return {}


def _name(key: Any) -> Any:
    return key.replace("-", "_") if isinstance(key, str) else key


def _whole(name: str, value: object) -> int:
    if type(value) is not int:
        raise InvalidValueError(name, value, "a whole number")
    return value


def _boolean(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise InvalidValueError(name, value, "true or false")
    return value
