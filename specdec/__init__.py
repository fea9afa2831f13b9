"""Speculative decoding in one process: algorithms, scheduling, running the model.

`from specdec import LLM, AsyncLLM, SamplingParams` is the Python API (docs/python.md). What it
takes is imported when it is first asked for: importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.llm import LLM, AsyncLLM
    from specdec.types.adapters import LoRARequest
    from specdec.types.reports.receipts import Receipt
    from specdec.types.sampling.reasoning_marks import ReasoningMarks
    from specdec.types.sampling.sampling_params import (
        GuidedDecodingParams,
        SamplingParams,
        SpeculationOptions,
        StructuredOutput,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "GuidedDecodingParams",
    "LoRARequest",
    "ReasoningMarks",
    "Receipt",
    "SamplingParams",
    "SpeculationOptions",
    "StructuredOutput",
    "StructuredOutputsParams",
]

_MODULES = {
    "LLM": "specdec.llm",
    "AsyncLLM": "specdec.llm",
    "LoRARequest": "specdec.types.adapters",
    "ReasoningMarks": "specdec.types.sampling.reasoning_marks",
    "Receipt": "specdec.types.reports.receipts",
}


def __getattr__(name: str) -> object:
    """Import a name in `__all__` from the module that defines it.

    Raises ImportError for an engine where only the client is installed.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "specdec.types.sampling.sampling_params")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        reason = f"specdec.{name} is in the package specdec; specdec-client has only the client"
        raise ImportError(reason) from error
