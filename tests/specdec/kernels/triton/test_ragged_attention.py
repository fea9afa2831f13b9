# Modules: specdec.kernels.triton.ragged_plan
"""Attention of ragged batches, whose tiles are planned on the device, against the reference."""

import pytest
import torch

from specdec.kernels import PagedAttention
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.device_batch import RaggedBatch
from specdec.kernels.triton.attention import InvariantAttention, TritonAttention
from specdec.models.weights.checkpoint import CPU
from specdec.types.sharding import HeadShard
from tests.specdec.kernels.triton.pages import Case, Pages
from tests.specdec.kernels.triton.test_attention import RAGGED


def ragged(pages, decode_len=4, num_padding=3, num_empty=2):
    """Return the batch of pages as the device makes it, then padding and empty sequences."""
    own, bounds = pages.batch, torch.from_numpy(pages.batch.cu_seqlens_q)
    zeros = torch.zeros(num_padding, dtype=torch.int64)
    rows = torch.arange(own.num_sequences).repeat_interleave(bounds.diff().long())
    tables, contexts = (
        torch.from_numpy(each).long() for each in (own.block_tables, own.context_lens)
    )
    return RaggedBatch(
        input_ids=torch.zeros(own.num_tokens + num_padding, dtype=torch.int64),
        positions=torch.cat([torch.from_numpy(own.positions).long(), zeros]),
        slot_mapping=torch.cat(
            [torch.from_numpy(own.slot_mapping).long(), zeros + pages.free_slot]
        ),
        rows=torch.cat([rows, zeros]),
        cu_seqlens=torch.cat([bounds, bounds[-1:].expand(num_empty)]),
        block_tables=torch.cat([tables, tables[:1].expand(num_empty, -1)]),
        context_lens=torch.cat([contexts, torch.ones(num_empty, dtype=torch.int64)]),
        decode_len=decode_len,
    )


MIXED = ((40, 40), (50, 1), (30, 20), (18, 4), (25, 17))


def check_ragged(case, decode_len=4, kind=TritonAttention):
    pages = Pages(case)
    batch, num_tokens = ragged(pages, decode_len), len(pages.query)
    expected = pages.expected()
    for each in (kind, PagedAttention):
        attention = each(case.heads, case.head_dim, case.block_size, CPU)
        plan = attention.plan_on_device(batch, case.dtype, Visible(case.window))
        padded = torch.cat([pages.query, torch.zeros_like(pages.query[:3])])
        kv = torch.cat([pages.own_kv, torch.full_like(pages.own_kv[:3], torch.nan)])
        found = attention.run(padded, kv, pages.cache.clone(), plan)[:num_tokens]
        assert (found.double() - expected).abs().max() < 2e-6


@pytest.mark.parametrize("lengths", [MIXED, RAGGED])
def test_ragged_batch_made_on_the_device(lengths):
    check_ragged(Case(lengths))


@pytest.mark.parametrize("kind", [TritonAttention, InvariantAttention])
def test_short_prompts_fill_the_tiles_of_decodes_with_segments(kind):
    """The parts of a tile hold more tokens than a decode has, where a prompt has more."""
    case = Case(((300, 3), (280, 1), (270, 7)), num_heads=4, kv_heads=2)
    check_ragged(case, decode_len=1, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 9])
def test_ragged_batches_with_groups_and_windows(group, window):
    check_ragged(Case(MIXED, num_heads=2 * group, window=window))


@pytest.mark.slow
def test_ragged_batch_with_invariant_attention():
    check_ragged(Case(MIXED), kind=InvariantAttention)


@pytest.mark.parametrize("lens", [[1] * 8, [16] * 8, [40], [1, 17, 1, 17], [0, 0, 3, 0, 50, 0]])
def test_every_query_of_a_ragged_batch_is_in_one_tile(lens):
    lens = torch.tensor(lens)
    num_tokens = int(lens.sum())
    shape = (len(lens), 1)
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    bounds = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    tables = torch.zeros(shape, dtype=torch.int64)
    batch = RaggedBatch(ids, ids, ids, ids, bounds, tables, lens, decode_len=1)
    heads = HeadShard.all_ranks(8, 2, 1)[0]
    plan = TritonAttention(heads, 16, 16, CPU).plan_on_device(batch, torch.float32)
    found = []
    for tiles in plan.launches:
        per_tile = tiles.shape.num_rows // heads.heads_per_kv
        for sequence, first in zip(tiles.sequences.tolist(), tiles.tokens.tolist(), strict=True):
            if sequence >= 0:
                end = min(first + per_tile, int(lens[sequence]))
                found += [(sequence, token) for token in range(first, end)]
    assert sorted(found) == [(i, token) for i, n in enumerate(lens.tolist()) for token in range(n)]
