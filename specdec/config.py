"""Configuration: frozen, checked where it is made, unknown keys refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from specdec.errors import InvalidValueError
from specdec.sampling_params import (
    MAX_NUM_SPECULATIVE_TOKENS,
    SPECULATION_METHODS,
    SpeculationMethod,
)

DTypeName = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[DTypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How the service drafts when a request does not say.

    num_speculative_tokens: draft tokens a step and sequence.
    prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that `ngram` looks up, longest
        first.
    """

    method: SpeculationMethod = "ngram"
    num_speculative_tokens: int = 3
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        if self.method not in SPECULATION_METHODS:
            limit = f"one of {', '.join(SPECULATION_METHODS)}"
            raise InvalidValueError("speculative_config.method", self.method, limit)
        require_range(
            "speculative_config.num_speculative_tokens",
            self.num_speculative_tokens,
            1,
            MAX_NUM_SPECULATIVE_TOKENS,
        )
        require_range("speculative_config.prompt_lookup_min", self.prompt_lookup_min, 1, 16)
        require_range(
            "speculative_config.prompt_lookup_max",
            self.prompt_lookup_max,
            self.prompt_lookup_min,
            16,
        )


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    max_model_len: most tokens of a sequence, prompt and output together.
    block_size: tokens in a KV block. num_blocks: KV blocks in the pool.
    max_num_seqs: most sequences that run at once.
    max_num_batched_tokens: most tokens of one forward pass; bounds how long a prefill chunk can
        hold up the sequences that are decoding.
    max_queue_len: most sequences that wait beyond max_num_seqs; one more is refused.
    """

    max_model_len: int
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_queue_len: int = 256
    speculation: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        require_range("max_model_len", self.max_model_len, 1, 2**24)
        require_range("block_size", self.block_size, 1, 1024)
        require_range("max_num_seqs", self.max_num_seqs, 1, 4096)
        require_range("max_queue_len", self.max_queue_len, 0, 1_000_000)
        # Every running sequence must be able to decode in every step.
        require_range(
            "max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs, 2**20
        )
        blocks_of_longest = -(-self.max_model_len // self.block_size)
        require_range("num_blocks", self.num_blocks, blocks_of_longest, 2**31)


def require_range(name: str, value: int, low: int, high: int) -> None:
    """Raises InvalidValueError unless low <= value <= high."""
    if not low <= value <= high:
        raise InvalidValueError(name, value, f"from {low} to {high}")
