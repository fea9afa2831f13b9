"""Reference tests: Triton's paged attention equals its definition."""

from dataclasses import replace

import pytest
import torch

from specdec.config.attention_splits import SEGMENT_TOKENS, SEGMENTS_PER_LEVEL, num_segments_of
from specdec.kernels import Rotation, TorchAttention
from specdec.kernels.attention import QueryKeyNorms, Visible
from specdec.kernels.device_batch import DeviceBatch, RaggedBatch
from specdec.kernels.kv_scales import KVScales, stored_values
from specdec.kernels.triton import attention_plan
from specdec.kernels.triton.attention import TritonAttention
from specdec.kernels.triton.attention_plan import Tiles, tile_rows
from specdec.models.weights.checkpoint import CPU
from specdec.types.sharding import HeadShard
from tests.specdec.kernels.triton.pages import Case, Pages

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3}
TREE = (-1, -1, 0, 0, 1, 2)
RAGGED = ((40, 1), (7, 3), (1, 1), (33, 6))


def attention_of(case, **options):
    return TritonAttention(
        case.heads,
        case.head_dim,
        case.block_size,
        CPU,
        softcap=case.soft_cap,
        latent_rank=case.latent_rank,
        **options,
    )


def run(pages, attention=None):
    """Run the batch; its own KV is written by the pass."""
    case = pages.case
    attention = attention or attention_of(case)
    plan = attention.plan(pages.batch, case.dtype, Visible(case.window, case.kv_start))
    cache, kv = pages.cache.clone(), pages.own_kv
    cache[torch.from_numpy(pages.batch.slot_mapping).long()] = torch.nan
    output = attention.run(pages.query, kv, cache, plan, pages.sinks)
    assert torch.equal(cache, pages.cache)
    return output


def check(case):
    pages = Pages(case)
    found, expected = run(pages), pages.expected()
    assert (found.double() - expected).abs().max() < TOLERANCE[case.dtype]


def test_ragged_rows_of_decode_and_drafts():
    check(Case(RAGGED))


def test_tree_beside_chains():
    check(Case(((21, 7), (30, 2), (18, 6)), trees={0: TREE, 2: TREE}))


@pytest.mark.parametrize("window", [1, 3, 9])
def test_windows(window):
    check(Case(RAGGED, window=window))


def test_prefill_beside_decode():
    check(Case(((40, 40), (50, 1), (30, 20))))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim, dtype):
    check(Case(((37, 3), (65, 1)), head_dim=head_dim, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_groups(group):
    check(Case(((19, 3), (34, 6)), num_heads=2 * group, kv_heads=2))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 24, 32, 64, 128])
def test_pages(block_size):
    check(Case(((130, 4), (5, 1), (64, 2)), block_size=block_size))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, 3, 20])
def test_trees_with_windows(window):
    """Nodes deeper than a window do not see the first nodes of their path."""
    deep = tuple(range(-1, 5))
    check(Case(((30, 7), (25, 6), (12, 12)), window=window, trees={0: TREE, 1: deep}))


@pytest.mark.slow
def test_tree_whose_first_nodes_have_kv():
    check(Case(((21, 2), (30, 1)), trees={0: TREE}))


@pytest.mark.slow
def test_tree_of_64_nodes():
    parents = (-1, *(index // 2 for index in range(63)))
    check(Case(((80, 65), (9, 1)), trees={0: parents}))


@pytest.mark.slow
@pytest.mark.parametrize("kv_start", [1, 5])
def test_slots_before_the_first_one_with_kv_are_not_read(kv_start):
    case = Case(((40, 30), (18, 1), (30, 3)), kv_start=kv_start)
    pages = Pages(case)
    expected = pages.expected()
    for slots in pages.slots:
        pages.cache[slots[:kv_start]] = torch.nan
    plan = attention_of(case).plan(pages.batch, case.dtype, Visible(kv_start=kv_start))
    found = attention_of(case).attend(pages.query, pages.cache, plan)
    assert (found.double() - expected).abs().max() < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [((600, 2), (1, 1), (300, 1)), ((256, 1), (257, 1), (513, 4))])
def test_contexts_of_several_segments(lengths):
    check(Case(lengths, num_heads=2, kv_heads=1))


@pytest.mark.slow
def test_one_program_merges_segments_to_the_same_bits(monkeypatch):
    pages = Pages(Case(((600, 3), (1, 1), (300, 2)), num_heads=2, kv_heads=1))
    by_parts = run(pages)
    monkeypatch.setattr(attention_plan, "ENOUGH_PROGRAMS", 1)
    assert torch.equal(run(pages), by_parts)


@pytest.mark.parametrize("window", [None, 9])
def test_batch_of_fixed_shape(window):
    """Sequences with fewer tokens repeat their last one, whose KV is not read."""
    case = Case(((40, 2), (7, 1), (20, 2)), window=window)
    pages, attention = Pages(case), attention_of(case)
    rows = [0, 1, 2, 2, 3, 4]
    batch = DeviceBatch(
        input_ids=torch.zeros(6, dtype=torch.int64),
        positions=torch.tensor([38, 39, 6, 6, 18, 19]),
        slot_mapping=torch.full((6,), -1),
        block_tables=torch.from_numpy(pages.batch.block_tables).long(),
        context_lens=torch.from_numpy(pages.batch.context_lens).long(),
        query_len=2,
    )
    plan = attention.plan_on_device(batch, case.dtype, Visible(window))
    found = attention.attend(pages.query[rows].contiguous(), pages.cache, plan)
    assert (found.double() - pages.expected()[rows]).abs().max() < 2e-6


@pytest.mark.parametrize(("window", "num_ahead"), [(None, 3), (9, 3), (2, 1)])
def test_blocks_whose_queries_see_ahead(window, num_ahead):
    """Up to the end of the context, and no key behind it."""
    case = Case(((40, 4), (13, 4)), window=window)
    pages = Pages(case)
    batch = DeviceBatch(
        input_ids=torch.zeros(8, dtype=torch.int64),
        positions=torch.from_numpy(pages.batch.positions).long(),
        slot_mapping=torch.from_numpy(pages.batch.slot_mapping).long(),
        block_tables=torch.from_numpy(pages.batch.block_tables).long(),
        context_lens=torch.from_numpy(pages.batch.context_lens).long(),
        query_len=4,
    )
    expected = _seen_ahead(pages, window, num_ahead)
    for kind in (TritonAttention, TorchAttention):
        attention = kind(case.heads, case.head_dim, case.block_size, CPU)
        plan = attention.plan_on_device(batch, case.dtype, Visible(window, num_ahead=num_ahead))
        found = attention.run(pages.query, pages.own_kv, pages.cache.clone(), plan)
        assert (found.double() - expected).abs().max() < 2e-6
    causal = attention.plan_on_device(batch, case.dtype, Visible(window))
    found = attention.run(pages.query, pages.own_kv, pages.cache.clone(), causal)
    assert (found.double() - expected).abs().max() > 1e-2


def _seen_ahead(pages, window, num_ahead):
    """Return attention by its definition, [T, num_heads, head_dim] in float64."""
    rows, group = [], pages.case.heads.heads_per_kv
    ends = pages.batch.context_lens.tolist()
    for token, position in enumerate(pages.batch.positions.tolist()):
        sequence = token // 4
        first = 0 if window is None else max(0, position - window + 1)
        seen = range(first, min(position + num_ahead + 1, ends[sequence]))
        kv = pages.cache[pages.slots[sequence][list(seen)]].double()
        keys, values = (kv[:, part].repeat_interleave(group, 1) for part in (0, 1))
        query = pages.query[token].double()
        scores = torch.einsum("hd,khd->hk", query, keys) * pages.case.head_dim**-0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(1), values))
    return torch.stack(rows)


def ragged(pages, decode_len=4, num_padding=3, num_empty=2):
    """Return the batch of pages as the device makes it, with padding and empty sequences behind."""
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


def check_ragged(case, decode_len=4, **options):
    pages = Pages(case)
    batch, num_tokens = ragged(pages, decode_len), len(pages.query)
    expected = pages.expected()
    for kind in (TritonAttention, TorchAttention):
        own = options if kind is TritonAttention else {}
        attention = kind(case.heads, case.head_dim, case.block_size, CPU, **own)
        plan = attention.plan_on_device(batch, case.dtype, Visible(case.window))
        padded = torch.cat([pages.query, torch.zeros_like(pages.query[:3])])
        kv = torch.cat([pages.own_kv, torch.full_like(pages.own_kv[:3], torch.nan)])
        found = attention.run(padded, kv, pages.cache.clone(), plan)[:num_tokens]
        assert (found.double() - expected).abs().max() < 2e-6


@pytest.mark.parametrize("lengths", [MIXED, RAGGED])
def test_ragged_batch_made_on_the_device(lengths):
    check_ragged(Case(lengths))


@pytest.mark.parametrize("invariant", [False, True])
def test_short_prompts_fill_the_tiles_of_decodes_with_segments(invariant):
    """The parts of a tile hold more tokens than a decode has, where a prompt has more."""
    case = Case(((300, 3), (280, 1), (270, 7)), num_heads=4, kv_heads=2)
    check_ragged(case, decode_len=1, invariant=invariant)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 9])
def test_ragged_batches_with_groups_and_windows(group, window):
    check_ragged(Case(MIXED, num_heads=2 * group, window=window))


@pytest.mark.slow
def test_ragged_batch_with_invariant_attention():
    check_ragged(Case(MIXED), invariant=True)


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


@pytest.mark.slow
def test_soft_cap():
    check(Case(RAGGED, soft_cap=0.5))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 300])
def test_bits_of_a_row_do_not_depend_on_its_batch(window):
    """A verified draft has the bits of the same token decoded alone, beside any other sequence."""
    case = Case(((300, 4), (700, 2), (20, 1)), num_heads=3, kv_heads=1, window=window)
    pages = Pages(case)
    together = run(pages)
    token = 0
    for index, (context, queries) in enumerate(case.lengths):
        for place in range(context - queries, context):
            alone = Pages(replace(case, lengths=((place + 1, 1),)))
            alone.cache.zero_()
            alone.cache[alone.slots[0]] = pages.cache[pages.slots[index][: place + 1]]
            alone.query = pages.query[token : token + 1]
            assert torch.equal(run(alone)[0], together[token]), (index, place)
            token += 1


@pytest.mark.slow
def test_invariant_attention_has_the_bits_of_decoding_in_a_prefill():
    case = Case(((290, 40),), num_heads=2, kv_heads=1)
    pages = Pages(case)
    prefilled = run(pages, attention_of(case, invariant=True))
    for token, place in ((0, 250), (7, 257), (39, 289)):
        alone = Pages(replace(case, lengths=((place + 1, 1),)))
        alone.cache[alone.slots[0]] = pages.cache[pages.slots[0][: place + 1]]
        alone.query = pages.query[token : token + 1]
        decoded = run(alone, attention_of(case, invariant=True))
        assert torch.equal(decoded[0], prefilled[token])


@pytest.mark.slow
def test_ranks_that_divide_a_kv_group():
    """Three groups of three heads on two ranks: both hold the KV head of the middle group."""
    case = Case(RAGGED, num_heads=9, kv_heads=3)
    pages = Pages(case)
    parts = []
    for shard in HeadShard.all_ranks(9, 3, 2):
        attention = TritonAttention(shard, case.head_dim, case.block_size, CPU)
        plan = attention.plan(pages.batch, case.dtype)
        cache = pages.cache[:, :, shard.kv].contiguous()
        query = pages.query[:, shard.query].contiguous()
        parts.append(attention.attend(query, cache, plan))
    assert (torch.cat(parts, 1).double() - pages.expected()).abs().max() < 2e-6


def test_empty_tiles_of_a_captured_launch_are_skipped():
    """A plan of fixed size has tiles with sequence -1, and tokens with slot -1."""
    case = Case(((20, 1), (9, 2)))
    pages, attention = Pages(case), attention_of(case)
    plan = attention.plan(pages.batch, case.dtype)
    (tiles,) = plan.launches
    padding = torch.full((3,), -1, dtype=torch.int32)
    sequences, tokens = (torch.cat([each, padding]) for each in (tiles.sequences, tiles.tokens))
    padded = Tiles.allocate(sequences, tokens, tiles.shape, case.kv_heads, case.head_dim)
    found = attention.attend(pages.query, pages.cache, replace(plan, launches=(padded,)))
    assert (found.double() - pages.expected()).abs().max() < 2e-6


def test_segments_cover_a_context():
    length, count = SEGMENT_TOKENS, SEGMENTS_PER_LEVEL
    assert [num_segments_of(n) for n in (1, length, length + 1)] == [1, 1, 2]
    assert num_segments_of(length * count) == count
    assert num_segments_of(length * count + 2 * length) == count + 1
    assert num_segments_of(3 * length * count + 1) == 2 * count + 1
    assert num_segments_of(131072) == 4 * count + 2
    assert [tile_rows(rows, 128) for rows in (1, 16, 17, 33, 400)] == [16, 16, 32, 64, 64]
    assert [tile_rows(rows, 512) for rows in (1, 17, 33, 400)] == [16, 32, 32, 32]


class _Norm:
    def __init__(self, weight, eps):
        self.weight, self.eps = weight, eps

    def __call__(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_norms_rotation_and_store_equal_torch(head_dim, has_norm):
    case = Case(((5, 5), (20, 1), (9, 2)), num_heads=6, kv_heads=2, head_dim=head_dim)
    pages = Pages(case)
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(pages.batch.num_tokens, 10, head_dim, generator=generator)
    angles = torch.randn(len(heads), 1, head_dim // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    weights = torch.rand(2, head_dim, generator=generator) + 0.5
    norms = QueryKeyNorms(*(_Norm(weight, 1e-5) for weight in weights)) if has_norm else None
    outputs, caches = [], []
    for kind in (TorchAttention, TritonAttention):
        attention = kind(case.heads, head_dim, case.block_size, CPU)
        cache = pages.cache.clone()
        plan = attention.plan(pages.batch, case.dtype)
        outputs.append(attention.rotate_and_run(heads.clone(), norms, rotation, cache, plan))
        caches.append(cache)
    torch.testing.assert_close(caches[1], caches[0], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SCALES = KVScales(0.25, 2.0)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("lengths", [((21, 7), (30, 2)), ((300, 3), (40, 40))])
def test_attention_to_a_cache_of_8_bit_floats(dtype, lengths):
    """In segments, in parts and as a whole, with a tree; the cache has scales."""
    case = Case(lengths, trees={0: TREE} if lengths[0] == (21, 7) else {})
    pages, attention = Pages(case), attention_of(case)
    cache = stored_values(pages.cache, dtype, SCALES)
    pages.cache = cache.float() * torch.tensor(SCALES).view(2, 1, 1)
    plan = attention.plan(pages.batch, case.dtype)
    found = attention.attend(pages.query, cache, plan, scales=SCALES)
    assert (found.double() - pages.expected()).abs().max() < 4e-6


@pytest.mark.parametrize("dtype", FP8)
def test_stored_8_bit_floats_are_those_of_torch(dtype):
    """Except for a few: the interpreter drops carries and subnormals when it rounds to fp8."""
    pages = Pages(Case(RAGGED))
    kv = pages.own_kv
    kv[0] = 1e6
    caches = []
    for kind in (TorchAttention, TritonAttention):
        attention = kind(pages.case.heads, pages.case.head_dim, pages.case.block_size, CPU)
        cache = torch.zeros(pages.cache.shape, dtype=dtype)
        plan = attention.plan(pages.batch, torch.float32)
        attention.run(pages.query, kv, cache, plan, scales=SCALES)
        caches.append(cache.float())
    largest = torch.finfo(dtype).max
    slot = int(pages.batch.slot_mapping[0])
    assert (caches[0][slot] == largest).all()
    assert (caches[1][slot] == largest).all()
    written = torch.from_numpy(pages.batch.slot_mapping).long()
    plain, found = (cache[written] for cache in caches)
    is_equal = found == plain
    assert is_equal.float().mean() > 0.8
