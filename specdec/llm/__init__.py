"""Python API: `LLM` for batches and `AsyncLLM` for streams, in one process."""

from specdec.llm.arguments import LLMArguments
from specdec.llm.async_llm import AsyncLLM
from specdec.llm.llm import LLM
from specdec.llm.metrics import Counter, Gauge, Histogram, Metric, Vector
from specdec.llm.outputs import CompletionOutput, Logprob, OutputKind, RequestOutput, RequestStats
from specdec.llm.prompts import TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Counter",
    "Gauge",
    "Histogram",
    "LLMArguments",
    "Logprob",
    "Metric",
    "OutputKind",
    "RequestOutput",
    "RequestStats",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
]
