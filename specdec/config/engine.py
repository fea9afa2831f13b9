"""Configuration of one engine and of its draft model."""

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
"""Element size of each data type that a model may be served in."""

Kernels = Literal["auto", "native", "torch"]
"""CPU kernels: `native` is this project's C++ code, compiled at first use; `auto` takes that if a
compiler is installed, else torch."""

_CPU_INFO = Path("/proc/cpuinfo")

MAX_STREAM_INTERVAL = 2**20
"""More tokens than are ever buffered."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine; for fields that are not described see `LLMConfig`.

    num_blocks: KV blocks in the pool.
    max_prefill_tokens: most prompt tokens of a forward pass in which other sequences decode, which
        bounds their delay by a prompt; None: as many as there is room for.
    max_queue_len: most sequences that wait beyond max_num_seqs; one more is rejected.
    async_scheduling: whether a step without drafts may be sent to the target before the one in
        flight is collected. The target must accept two.
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
    confidence_threshold: a draft ends where no token has this probability; 0 disables the check.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_catch_up_tokens: int
    enable_prefix_caching: bool = True
    confidence_threshold: float = 0.0


def has_fbgemm() -> bool:
    """Return whether torch probably has FBGEMM's int8 kernels, which need x86 with AVX2.

    A rank asks torch itself.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return not _CPU_INFO.is_file() or "avx2" in _CPU_INFO.read_text(encoding="utf-8").split()
