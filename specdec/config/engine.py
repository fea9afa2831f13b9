"""Configuration of one engine and its draft model: frozen and validated when it is created."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS
from specdec.types.validation import require_range

if TYPE_CHECKING:
    from specdec.config.kv_cache import KVCacheDType
    from specdec.config.speculation.speculative import SpeculativeConfig


DTypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[DTypeName, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Size in bytes of one element of each supported data type."""


def kv_element_bytes(dtype: DTypeName, kv_cache_dtype: KVCacheDType = "auto") -> int:
    """Return the bytes of an element of keys and values; dtype: of the model."""
    return DTYPE_BYTES[dtype] if kv_cache_dtype == "auto" else 1


Kernels = Literal["auto", "native", "triton", "torch"]
"""Kernels of a forward pass: `native` is this project's C++ code for CPUs, compiled on first use,
`triton` its Triton code for GPUs; `auto` uses that of the device if a compiler or Triton is
installed, and torch otherwise."""


ModelImpl = Literal["auto", "specdec", "transformers"]
"""Implementation of a model: `specdec` is this project's decoder, `transformers` the modelling code
of transformers over this project's KV cache; `auto` prefers the first."""


@dataclass(frozen=True)
class ModelOptions:
    """How the ranks of a model read and divide it.

    impl: whose code runs it. divides_by_expert: whether each rank has whole experts of a mixture
    rather than a share of each. overrides: of its config.json, as JSON text; None without any.
    has_defaults: whether generation_config.json gives sampling defaults, not end tokens alone.
    """

    impl: ModelImpl = "auto"
    divides_by_expert: bool = False
    overrides: str | None = None
    has_defaults: bool = True


DEFAULT_MODEL_OPTIONS = ModelOptions()


_CPU_INFO = Path("/proc/cpuinfo")
_LEAST_TILE = 16

MOST_UPDATE_PARTS = 16
"""Most parts of the inner dimension of a product with A of adapters on a GPU, which are added
after it. The kernels compute with it, and the memory plan counts the parts."""

LEAST_UPDATE_PART = 256
"""Least inputs of such a part."""

LEAST_SNAPSHOT_INTERVAL = 32
"""Least KV blocks for each snapshot of states; the chunks of a long prompt end so far apart."""

MAX_STREAM_INTERVAL = 2**20
"""More tokens than are ever buffered."""


@dataclass(frozen=True)
class AdapterLimits:
    """Limits of LoRA adapters.

    max_loras: different adapters in a step. max_rank: of an adapter. max_loaded: adapters in the
    memory of the ranks.
    """

    max_loras: int
    max_rank: int
    max_loaded: int

    @property
    def device_rank(self) -> int:
        """The rank for which a GPU reserves memory: a power of 2, at least that of its tiles."""
        return max(_LEAST_TILE, 1 << (self.max_rank - 1).bit_length())


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine; for fields that are not described see `LLMConfig`.

    max_model_len: maximum tokens of a sequence, prompt and output together.
    block_size: tokens in a KV block. num_blocks: KV blocks in the pool.
    max_num_seqs: maximum number of running sequences.
    max_num_batched_tokens: maximum tokens in one forward pass.
    max_prefill_tokens: maximum prompt tokens in a pass in which other sequences decode, which
        bounds the delay of those; None: limited by max_num_batched_tokens alone.
    max_queue_len: maximum number of waiting sequences; more are rejected.
    enable_prefix_caching: whether the KV blocks of a common prompt prefix are reused.
    stream_interval: output tokens to buffer before they are sent, unless the request specifies it;
        the first and the last tokens are sent immediately, and the second message may be shorter.
    async_scheduling: whether a step may be sent to the target before the result of the previous
        one is collected. The target must accept two steps in flight.
    adapters: limits of LoRA adapters; None where none can be loaded.
    enforce_eager: whether a GPU launches the operators of each step one by one, without graphs.
    deterministic: whether the bits of a token's logits must not depend on the batch, nor on how its
        text was divided into steps.
    compare_ranks: whether several ranks compare their tokens and drafts in each step.
    kv_cache_dtype: of keys and values; auto: the data type of the model.
    keeps_guesses: whether the target's recurrent layers keep the inputs of the guesses of a row,
        which are then at most max_row_guesses.
    state_bytes: of the states of a sequence in recurrent layers. num_snapshots: of such states, for
        the prefix cache. snapshot_interval: KV blocks between those of a long prompt.
    most_padding_tokens: padding of a step up to which the target pads rows to the longest, where a
        GPU runs it; 0 on a CPU, which never does.
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
    enforce_eager: bool = False
    deterministic: bool = False
    compare_ranks: bool = False
    kv_cache_dtype: KVCacheDType = "auto"
    speculation: SpeculativeConfig | None = None
    adapters: AdapterLimits | None = None
    keeps_guesses: bool = False
    state_bytes: int = 0
    num_snapshots: int = 0
    snapshot_interval: int = LEAST_SNAPSHOT_INTERVAL
    most_padding_tokens: int = 0

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
        require_range("num_snapshots", self.num_snapshots, 0, 2**31)
        require_range("snapshot_interval", self.snapshot_interval, 1, 2**31)
        require_range("most_padding_tokens", self.most_padding_tokens, 0, 2**63)
        blocks_of_longest = -(-self.max_model_len // self.block_size)
        require_range("num_blocks", self.num_blocks, blocks_of_longest, 2**31)

    @property
    def max_row_guesses(self) -> int:
        """Most guesses of a row, unless a request asks for more draft tokens than configured."""
        return 0 if self.speculation is None else self.speculation.max_row_guesses

    def require_room(self, num_present: int, num_choices: int) -> None:
        """Raise OverloadedError for a request whose choices do not fit into batch and queue now.

        Raises InvalidValueError where they never fit.
        """
        most = self.max_num_seqs + self.max_queue_len
        if num_choices > most:
            limit = f"at most {most} (max_num_seqs and max_queue_len together)"
            raise InvalidValueError("n", num_choices, limit)
        if num_present + num_choices > most:
            count = f"{num_present} of {most} requests run or wait, each choice counted as one"
            raise OverloadedError(f"{count}; this one has {num_choices}")

    @property
    def rank_drafters_read_tokens(self) -> bool:
        """Return whether what drafts on the target's ranks needs the tokens of every sequence."""
        drafters = self.speculation.rank_drafters if self.speculation else ()
        return any(each.reads_tokens for each in drafters)


@dataclass(frozen=True)
class DraftLimits:
    """Limits of a draft model.

    num_blocks, block_size: its KV pool. max_model_len: maximum tokens of a sequence.
    max_catch_up_tokens: maximum tokens to prefill in one step, over all sequences, before drafting;
        bounds the delay of the next drafts.
    confidence_threshold: a draft ends when the most likely token has a lower probability; 0
        disables this.
    parallel_drafting, draft_window: as in DraftModelConfig.
    token_map: its `speculative_token_map`.
    max_num_seqs, enforce_eager: as in EngineConfig; a GPU drafts for more sequences with the host.
    compare_ranks, kv_cache_dtype: as in EngineConfig.
    adapters: limits of its LoRA adapters; None where none can be loaded.
    max_draft_tokens: most tokens of a draft, whose inputs recurrent layers keep.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_catch_up_tokens: int
    enable_prefix_caching: bool = True
    confidence_threshold: float = 0.0
    parallel_drafting: bool = False
    draft_window: int | None = None
    token_map: str | None = None
    max_num_seqs: int = 1
    enforce_eager: bool = False
    compare_ranks: bool = False
    kv_cache_dtype: KVCacheDType = "auto"
    adapters: AdapterLimits | None = None
    max_draft_tokens: int = MAX_NUM_SPECULATIVE_TOKENS


def snapshot_interval(state_bytes: int, block_bytes: int) -> int:
    """Return the KV blocks for each snapshot of states, which takes no more memory than they do."""
    return max(LEAST_SNAPSHOT_INTERVAL, -(-state_bytes // block_bytes))


def has_fbgemm() -> bool:
    """Return whether torch probably supports int8 matrices here; a rank checks with torch.

    FBGEMM requires x86 with AVX2.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return not _CPU_INFO.is_file() or "avx2" in _CPU_INFO.read_text(encoding="utf-8").split()
