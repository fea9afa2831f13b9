"""Reads the settings of a service, which may be told in vLLM's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.vllm_compat import RENAMED, SERVICE
from specdec.config import vllm_compat


def in_our_words(
    *sources: Mapping[Any, Any], model: str = "", device: str = "cpu"
) -> dict[str, Any]:
    """See `specdec.config.vllm_compat.in_our_words`."""
    return vllm_compat.in_our_words(SERVICE, *sources, model=model, device=device)


def our_name(name: Any) -> Any:
    """What a setting is called here, whose name may be vLLM's, with dashes or underscores."""
    name = name.replace("-", "_") if isinstance(name, str) else name
    return RENAMED.get(name, name)
