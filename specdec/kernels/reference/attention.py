"""Paged attention: prefill, decode and draft tokens of a flat batch in one call.

A `PagedAttention` is called twice: `plan`, once per forward pass on the host, and `rotate_and_run`,
once per layer. `kernels.reference.torch_attention` is the reference, `kernels.triton.attention`
runs on GPUs.

The KV cache of one layer is [num_slots, 2, num_kv_heads, head_dim] (keys, then values), so that
writing a token's KV and reading a sequence's pages are one indexed copy each. With latents it is
[num_slots, 1, 1, head_dim]: the last dimensions of the key that all heads share are their value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.kernels.reference.device_batch import AnyDeviceBatch
from specdec.kernels.reference.forward_batch import ForwardBatch
from specdec.kernels.reference.kv_scales import UNIT_SCALES, KVScales
from specdec.types.sharding import HeadShard


@dataclass(frozen=True)
class Rotation:
    """Rotations of a batch's tokens; computed once per forward pass, used by every layer."""

    cos: Tensor  # [T, 1, rotary_dim]
    sin: Tensor  # [T, 1, rotary_dim], its first half negated

    def apply_(self, x: Tensor) -> None:
        """Rotate the first rotary_dim dimensions of x [T, heads, head_dim] in place."""
        x = x[..., : self.cos.shape[-1]]
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        x.mul_(self.cos).addcmul_(swapped, self.sin)


class Norm(Protocol):
    """Root mean square norm over the last dimension."""

    weight: Tensor  # [head_dim]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized x [..., head_dim]."""
        ...


class QueryKeyNorms(NamedTuple):
    """Norms of each head of queries and of keys, before the rotation."""

    query: Norm
    key: Norm


@dataclass(frozen=True)
class Visible:
    """The part of its context that a query sees.

    window: number of visible tokens, its own included; None for no limit. kv_start: slots before
    it have no KV; no token of a batch is there. num_ahead: tokens after its
    own that it sees, as far as the context has them; 0 but in a DeviceBatch. chunk: size of the
    chunks of positions, of which it sees its own alone; None for no chunks.
    """

    window: int | None = None
    kv_start: int = 0
    num_ahead: int = 0
    chunk: int | None = None

    def first_position(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        first = 0 if self.window is None else position - self.window + 1
        if self.chunk is not None:
            first = max(first, position - position % self.chunk)
        return max(first, 0)


ALL_BEFORE = Visible()


class AttentionPlan(Protocol):
    """The part of a batch's attention that is the same for all layers, of one implementation."""

    @property
    def slot_mapping(self) -> Tensor:
        """The slot of each token's KV, [T] int32 or int64."""
        ...


class PagedAttention(ABC):
    """Grouped-query attention over one rank's paged KV cache.

    missing_heads: query heads of the KV groups that other ranks hold, before this rank's and
    after them. copies_pages: whether the visible pages are copied, for `plan_on_device` those of
    whole tables.
    """

    copies_pages = False

    def __init__(
        self,
        heads: HeadShard,
        head_dim: int,
        block_size: int,
        device: torch.device,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        latent_rank: int | None = None,
    ) -> None:
        """heads: of this rank. scale: factor of scores; None: 1 / sqrt(head_dim).

        softcap: bound c of scores s, which become c * tanh(s / c); None: no bound. latent_rank:
        dimensions of the latents that are values; None where values are apart from keys.
        """
        assert latent_rank is None or len(heads.kv) == 1, "all heads share one latent"
        self.num_kv_heads = len(heads.kv)
        self.heads_per_kv = heads.heads_per_kv
        after = len(heads.kv) * heads.heads_per_kv - heads.first_in_group - len(heads.query)
        self.missing_heads = (heads.first_in_group, after)
        self.head_dim = head_dim
        self.block_size = block_size
        self.device = device
        self.softcap = softcap
        self.latent_rank = latent_rank
        self.scale = head_dim**-0.5 if scale is None else scale

    @property
    def kv_parts(self) -> int:
        """Vectors of a token that a KV head has in the cache: key and value, or both as one."""
        return 2 if self.latent_rank is None else 1

    @property
    def value_dim(self) -> int:
        """Dimensions of a value, and so of the result for a head."""
        return self.head_dim if self.latent_rank is None else self.latent_rank

    @abstractmethod
    def plan(
        self, batch: ForwardBatch, dtype: torch.dtype, visible: Visible = ALL_BEFORE
    ) -> AttentionPlan:
        """Plan the attention of a batch for all layers in which queries see the same."""

    @abstractmethod
    def plan_on_device(
        self, batch: AnyDeviceBatch, dtype: torch.dtype, visible: Visible = ALL_BEFORE
    ) -> AttentionPlan:
        """Plan a batch of fixed shape as `plan`, without a value that the host has to read."""

    @abstractmethod
    def rotate_and_store(
        self,
        heads: Tensor,
        norms: QueryKeyNorms | None,
        rotation: Rotation | None,
        kv_cache: Tensor,
        slots: Tensor,
        scales: KVScales = UNIT_SCALES,
    ) -> None:
        """Write keys and values to slots [T] without attention; others as in `rotate_and_run`."""

    @abstractmethod
    def rotate_and_run(
        self,
        heads: Tensor,  # [T, num_heads + kv_parts * num_kv_heads, head_dim]: queries, keys, values
        norms: QueryKeyNorms | None,
        rotation: Rotation | None,
        kv_cache: Tensor,  # [num_slots, kv_parts, num_kv_heads, head_dim], changed in place
        plan: AttentionPlan,
        sinks: Tensor | None = None,  # [num_heads]
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """Normalize and rotate queries and keys, then `run`; may change `heads`."""

    @abstractmethod
    def run(
        self,
        query: Tensor,
        kv: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        sinks: Tensor | None = None,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """Write this pass's `kv` to its slots, then attend; return [T, num_heads, value_dim].

        sinks: [num_heads], the score of a key that every query sees and that has no value (Xiao et
        al. 2023, section 3.3); None without.
        query: [T, num_heads, head_dim]. kv: [T, kv_parts, num_kv_heads, head_dim], keys rotated.
        kv_cache: [num_slots, kv_parts, num_kv_heads, head_dim], changed in place.
        scales: of a cache of 8-bit floats; those of key and value are equal with latents.
        """
