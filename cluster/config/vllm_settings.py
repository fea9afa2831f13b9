"""Reads the settings of a service, under vLLM's names too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.vllm_compat import ALWAYS, RENAMED
from specdec.config import vllm_compat


def in_our_words(
    *sources: Mapping[Any, Any], model: str = "", device: str = "cpu"
) -> dict[str, Any]:
    """See `specdec.config.vllm_compat.in_our_words`."""
    return vllm_compat.in_our_words(
        *sources, renamed=RENAMED, always=ALWAYS, model=model, device=device
    )


def our_name(name: Any) -> Any:
    """Return our name of a setting under vLLM's name, with dashes or underscores."""
    name = name.replace("-", "_") if isinstance(name, str) else name
    return RENAMED.get(name, name)
