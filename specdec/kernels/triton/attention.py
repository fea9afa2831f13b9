"""Paged attention on a GPU: decode, drafts, trees of drafts and prefill.

The queries of a sequence form tiles of 16 to 64 rows, in which the heads that share a KV head stand
side by side: a page of KV is read once for all drafts of a sequence (as by FlashInfer, Ye et al.
2025, arXiv 2501.01005). Short queries (decode, drafts) divide their context into segments at fixed
positions counted from its start (Flash-Decoding, Dao et al. 2023), which are merged in order: by
one program where there are programs enough, else by a second kernel. So the sums of a row depend
neither on the other sequences of its batch nor on the drafts beside it.

Long chunks of a prompt have no segments, so their bits may differ in the last place from those of
the same tokens decoded one by one. Hopper multiplies tiles of 64 rows by another instruction than
those of 16 and 32, and may round differently. An `invariant` attention has one tile and always
segments.

With latents (DeepSeek) all heads share one key, so they are divided among programs in equal parts
that fill a tile; a program reads a latent once, for scores and sums.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specdec.config.gpu.attention_splits import ENOUGH_PROGRAMS, heads_per_program
from specdec.kernels.reference.attention import (
    ALL_BEFORE,
    AttentionPlan,
    QueryKeyNorms,
    Rotation,
    Visible,
)
from specdec.kernels.reference.device_batch import AnyDeviceBatch, RaggedBatch
from specdec.kernels.reference.forward_batch import ForwardBatch
from specdec.kernels.reference.kv_scales import UNIT_SCALES, KVScales, is_quantized
from specdec.kernels.reference.paged_attention import PagedAttention
from specdec.kernels.triton.attention_plan import (
    Tiles,
    TritonPlan,
    ValueSize,
    plan_batch,
    plan_device_batch,
)
from specdec.kernels.triton.device import attention as kernels
from specdec.kernels.triton.device.store_kv import rotate_and_store as store_kernel
from specdec.kernels.triton.ragged_plan import plan_ragged_batch
from specdec.types.sharding import HeadShard

_NO_WINDOW = 2**30
_MAX_SPLITS = 64
_ENOUGH_WITH_SPLITS = 4096
"""Programs beyond which a launch is not split further: those without a segment cost time too."""
_MERGED_ROWS = 4
_HEADS_PER_PROGRAM = 4


class _Pass(NamedTuple):
    """The tensors of one call of `attend`."""

    query: Tensor  # [T, num_heads, head_dim]
    kv_cache: Tensor
    output: Tensor  # [T, num_heads, value_dim]
    plan: TritonPlan
    sinks: Tensor | None  # [num_heads]
    scales: KVScales

    @property
    def sinks_or_any(self) -> Tensor:
        """The sinks, or where there are none a tensor that is not read."""
        return self.output if self.sinks is None else self.sinks


class TritonAttention(PagedAttention):
    """Paged attention by kernels.

    invariant: whether long chunks are computed like short queries, so that the bits of a row do not
    depend on how its text was split into passes.
    """

    copies_pages = False
    invariant = False

    @cached_property
    def _divided(self) -> HeadShard:
        """The heads as programs have them."""
        num_heads = len(self.heads.query)
        return self.heads if self.latent_rank is None else _divide_heads(num_heads)

    @property
    def _rotary_dim(self) -> int:
        """Dimensions of a key with latents that are no part of its value."""
        return self.head_dim - self.value_dim

    @cached_property
    def _block_d(self) -> int:
        return _block_of(self.value_dim)

    def plan(
        self, batch: ForwardBatch, dtype: torch.dtype, visible: Visible = ALL_BEFORE
    ) -> TritonPlan:
        """See PagedAttention."""
        sizes = (self._divided, ValueSize(self.value_dim, dtype.itemsize), self.device)
        return plan_batch(batch, *sizes, visible, invariant=self.invariant)

    def plan_on_device(
        self, batch: AnyDeviceBatch, dtype: torch.dtype, visible: Visible = ALL_BEFORE
    ) -> TritonPlan:
        """See PagedAttention."""
        sizes = (self._divided, ValueSize(self.value_dim, dtype.itemsize), self.block_size)
        if isinstance(batch, RaggedBatch):
            return plan_ragged_batch(batch, *sizes, visible, invariant=self.invariant)
        return plan_device_batch(batch, *sizes, visible, invariant=self.invariant)

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        sinks: Tensor | None = None,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """See PagedAttention."""
        assert isinstance(plan, TritonPlan)
        assert self.latent_rank is None or scales.key == scales.value, "a value is a part of a key"
        output = query.new_empty(*query.shape[:2], self.value_dim)
        own = None if sinks is None else sinks.contiguous()
        run = _Pass(query, kv_cache, output, plan, own, scales)
        for tiles in plan.launches:
            self._launch(run, tiles)
            if tiles.parts is not None:
                self._merge(run, tiles)
        return output

    def rotate_and_store(
        self,
        heads: Tensor,
        norms: QueryKeyNorms | None,
        rotation: Rotation | None,
        kv_cache: Tensor,
        slots: Tensor,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """See PagedAttention."""
        (num_tokens, count, head_dim), num_heads = heads.shape, len(self.heads.query)
        query = heads.new_empty(num_tokens, num_heads, head_dim)
        assert count == num_heads + self.kv_parts * self.num_kv_heads
        assert heads.stride()[1:] == (head_dim, 1)
        store_kernel[(num_tokens, triton.cdiv(count, _HEADS_PER_PROGRAM))](
            heads,
            query,
            kv_cache,
            slots.contiguous(),
            rotation.cos if rotation else heads,
            rotation.sin if rotation else heads,
            norms.query.weight if norms else heads,
            norms.key.weight if norms else heads,
            heads.stride(0),
            norms.query.eps if norms else 0.0,
            scales.key,
            scales.value,
            NUM_HEADS=num_heads,
            KV_HEADS=self.num_kv_heads,
            KV_PARTS=self.kv_parts,
            HEAD_DIM=head_dim,
            ROTARY_DIM=rotation.cos.shape[-1] if rotation else head_dim,
            BLOCK_D=_block_of(head_dim),
            BLOCK_H=_HEADS_PER_PROGRAM,
            ROTATES=rotation is not None,
            HAS_NORM=norms is not None,
            LARGEST=torch.finfo(kv_cache.dtype).max if is_quantized(kv_cache) else 0.0,
            num_warps=4,
        )
        return query

    def _launch(self, run: _Pass, tiles: Tiles) -> None:
        """Write the attention of tiles to the output, or that of their segments to their parts."""
        assert run.query.is_contiguous()
        assert run.kv_cache.is_contiguous()
        plan, shape, parts = run.plan, tiles.shape, tiles.parts
        visible = plan.visible
        num_parts = 0 if parts is None else parts.values.shape[2]
        num_programs = len(tiles.sequences) * len(self._divided.kv)
        most_splits = min(_MAX_SPLITS, max(1, _ENOUGH_WITH_SPLITS // num_programs))
        splits = max(1, min(num_parts, most_splits))
        kernels.paged_attention[(len(tiles.sequences), len(self._divided.kv), splits)](
            run.query,
            run.kv_cache,
            run.output if parts is None else parts.values,
            run.output if parts is None else parts.statistics,
            tiles.sequences,
            tiles.tokens,
            plan.cu_seqlens,
            plan.context_lens,
            plan.first_nodes,
            plan.block_tables,
            plan.positions,
            plan.positions if plan.ancestors is None else plan.ancestors,
            run.sinks_or_any,
            plan.block_tables.stride(0),
            num_parts,
            shape.used_rows,
            _NO_WINDOW if visible.window is None else visible.window,
            visible.kv_start,
            self.scale,
            1.0 if self.softcap is None else self.softcap,
            run.scales.key,
            run.scales.value,
            HEAD_DIM=self.head_dim,
            ROTARY_DIM=self._rotary_dim,
            BLOCK_R=_block_of(self._rotary_dim),
            BLOCK_N=block_of_keys(self._block_d, run.query.element_size()),
            PAGE=self.block_size,
            HAS_TREES=plan.ancestors is not None,
            HAS_CAP=self.softcap is not None,
            NUM_AHEAD=visible.num_ahead,
            HAS_SEGMENTS=shape.num_segments is not None,
            HAS_PARTS=parts is not None,
            **self._sizes(run, tiles),
            num_warps=warps_of_tile(shape.num_rows, self._block_d, run.query.element_size()),
            num_stages=stages_of(
                num_programs,
                run.query.element_size(),
                merges_segments=shape.num_segments is not None and parts is None,
            ),
        )

    def _merge(self, run: _Pass, tiles: Tiles) -> None:
        """Write the attention of tiles to the output from that of their segments."""
        plan, shape, parts = run.plan, tiles.shape, tiles.parts
        assert parts is not None
        row_blocks = triton.cdiv(shape.used_rows, _MERGED_ROWS)
        kernels.merge_segments[(len(tiles.sequences), len(self._divided.kv), row_blocks)](
            parts.values,
            parts.statistics,
            run.output,
            tiles.sequences,
            tiles.tokens,
            plan.cu_seqlens,
            plan.context_lens,
            run.sinks_or_any,
            parts.values.shape[2],
            shape.used_rows,
            run.scales.value,
            BLOCK_ROWS=_MERGED_ROWS,
            **self._sizes(run, tiles),
            num_warps=4,
        )

    def _sizes(self, run: _Pass, tiles: Tiles) -> dict[str, int]:
        """Return the compile-time constants that both kernels have."""
        return {
            "NUM_HEADS": len(self.heads.query),
            "KV_HEADS": len(self._divided.kv),
            "GROUP": self._divided.heads_per_kv,
            "FIRST_HEAD": self.heads.first_in_group,
            "VALUE_DIM": self.value_dim,
            "BLOCK_D": self._block_d,
            "BLOCK_M": tiles.shape.num_rows,
            "HAS_SINKS": run.sinks is not None,
        }


class InvariantAttention(TritonAttention):
    """Attention whose rows have the same bits in any batch and however a text is split."""

    invariant = True


def _divide_heads(num_heads: int) -> HeadShard:
    """Return heads that share one key as groups of equal size, the last of which may be smaller."""
    size = heads_per_program(num_heads)
    return HeadShard(range(num_heads), range(triton.cdiv(num_heads, size)), size)


def _block_of(size: int) -> int:
    """Return the dimensions of a block that holds `size`, which products can have."""
    return max(16, int(triton.next_power_of_2(size)))


def block_of_keys(block_d: int, element_size: int) -> int:
    """Return the positions that a program reads at once.

    They fit into shared memory, and beside wide sums into registers. It must not depend on the
    tile, since the bits of a row depend on it.
    """
    if block_d > 256:
        return 16
    return 64 if block_d * element_size <= 256 else 32


def stages_of(num_programs: int, element_size: int, *, merges_segments: bool) -> int:
    """Return the stages in which blocks of keys are read: more where few programs wait for them.

    Programs that merge segments hold two sets of sums, beside which a third stage would spill.
    """
    if merges_segments or num_programs >= ENOUGH_PROGRAMS or element_size != 2:
        return 2
    return 3


def warps_of_tile(num_rows: int, block_d: int, element_size: int) -> int:
    """Return the warps of a tile, so that sums of large ones fit into registers."""
    return 8 if num_rows >= 64 or num_rows * block_d * element_size >= 32 * 256 * 2 else 4
