"""Configuration: frozen, checked where it is made, unknown keys refused."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from specdec.types.validation import require_range

if TYPE_CHECKING:
    from specdec.config.speculative import SpeculativeConfig


DTypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[DTypeName, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Of each data type that a model may be served in, the size of an element."""


Kernels = Literal["auto", "native", "torch"]
"""What multiplies on a CPU: `native` is this project's code in C++, compiled when it is first used;
`auto` takes that where there is a compiler, and torch elsewhere."""


_CPU_INFO = Path("/proc/cpuinfo")

MAX_STREAM_INTERVAL = 2**20
"""More tokens than are ever held back."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    max_model_len: most tokens of a sequence, prompt and output together.
    block_size: tokens in a KV block. num_blocks: KV blocks in the pool.
    max_num_seqs: most sequences that run at once.
    max_num_batched_tokens: most tokens of one forward pass.
    max_prefill_tokens: most of them that may be of prompts while other sequences decode, which
        bounds how long a prompt holds those up; None: as many as there is room for.
    max_queue_len: most sequences that wait beyond max_num_seqs; one more is refused.
    enable_prefix_caching: whether KV of a prompt's beginning is used again for the next one.
    stream_interval: of how many new tokens of a choice is told at once, where a request does not
        say; the first and the last ones never wait, and the second ones may be fewer.
    async_scheduling: whether a step may be handed to the target before the one in flight is
        collected, where nothing is drafted. Its target has to take two.
    """

    max_model_len: int
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_prefill_tokens: int | None = None
    max_queue_len: int = 256
    enable_prefix_caching: bool = True
    stream_interval: int = 1
    async_scheduling: bool = False
    speculation: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        require_range("max_model_len", self.max_model_len, 1, 2**24)
        require_range("block_size", self.block_size, 1, 1024)
        require_range("max_num_seqs", self.max_num_seqs, 1, 4096)
        require_range("max_queue_len", self.max_queue_len, 0, 1_000_000)
        require_range("stream_interval", self.stream_interval, 1, MAX_STREAM_INTERVAL)
        # Every running sequence must be able to decode in every step.
        require_range(
            "max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs, 2**20
        )
        require_range("max_prefill_tokens", self.max_prefill_tokens, 1, 2**20)
        blocks_of_longest = -(-self.max_model_len // self.block_size)
        require_range("num_blocks", self.num_blocks, blocks_of_longest, 2**31)


@dataclass(frozen=True)
class DraftLimits:
    """Limits of a draft model.

    num_blocks, block_size: its KV pool. max_model_len: most tokens of a sequence.
    max_catch_up_tokens: most tokens to catch up on in one step, over all sequences; bounds how long
        the next drafts wait.
    confidence_threshold: a draft ends where no token has this probability; 0 for never.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_catch_up_tokens: int
    enable_prefix_caching: bool = True
    confidence_threshold: float = 0.0


def has_fbgemm() -> bool:
    """Whether torch is likely to multiply by int8 matrices here; a rank asks torch itself.

    FBGEMM is for x86 with AVX2.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return not _CPU_INFO.is_file() or "avx2" in _CPU_INFO.read_text(encoding="utf-8").split()
