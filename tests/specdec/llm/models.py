"""`LLM`s on the tiny model, with small limits and a policy without measurements."""

from pathlib import Path
from typing import Any

SPECULATION = {"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold"}
"""The model drafts for itself, so that its drafts are accepted."""


def arguments(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return arguments of an `LLM` or `AsyncLLM` that loads quickly."""
    values: dict[str, Any] = {
        "model": str(directory),
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "speculative_config": SPECULATION,
        "kernels": "torch",
        "kv_cache_memory_gib": 0.05,
    }
    return values | changes


def metrics_of(llm: Any) -> dict[str, Any]:
    """Return values by name without the prefix; labels other than the model follow the name."""
    values = {}
    for metric in llm.get_metrics():
        labels = [value for name, value in metric.labels.items() if name != "model_name"]
        key = " ".join([metric.name.removeprefix("specdec:"), *labels])
        values[key] = getattr(metric, "values", None) or getattr(metric, "value", metric)
    return values
