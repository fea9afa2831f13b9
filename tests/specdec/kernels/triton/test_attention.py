# Modules: specdec.kernels.triton.attention_plan, specdec.kernels.triton.device.attention
"""Reference tests: Triton's paged attention equals its definition."""

from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from specdec.config.gpu.attention_splits import SEGMENT_TOKENS, SEGMENTS_PER_LEVEL, num_segments_of
from specdec.kernels import PagedAttention
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.device_batch import DeviceBatch
from specdec.kernels.reference.forward_batch import ForwardBatch
from specdec.kernels.triton import attention_plan
from specdec.kernels.triton.attention import InvariantAttention, TritonAttention, stages_of
from specdec.kernels.triton.attention_plan import Tiles, TileShape, ValueSize, tile_rows
from specdec.models.weights.checkpoint import CPU
from specdec.types.sharding import HeadShard
from tests.specdec.kernels.triton.pages import Case, Pages

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3}
TREE = (-1, -1, 0, 0, 1, 2)
RAGGED = ((40, 1), (7, 3), (1, 1), (33, 6))
_HALF = 2**31  # of the range of unsigned integers of 32 bits


def attention_of(case, *, invariant=False):
    return (InvariantAttention if invariant else TritonAttention)(
        case.heads,
        case.head_dim,
        case.block_size,
        CPU,
        softcap=case.soft_cap,
        latent_rank=case.latent_rank,
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


@pytest.mark.parametrize("latent_rank", [None, 16])
def test_pool_whose_offsets_need_64_bits(monkeypatch, latent_rank):
    """Offsets of 32 bits would lead to the memory before the pool, which has the same size."""
    kv_heads, head_dim = (2, 16) if latent_rank is None else (1, 32)
    case = Case(RAGGED, 4, kv_heads, head_dim, dtype=torch.float16, latent_rank=latent_rank)
    pages = Pages(case)
    first_slot = _HALF // pages.cache[0].numel()
    first_block = first_slot // case.block_size
    chunks = [
        chunk._replace(block_table=[first_block + block for block in chunk.block_table])
        for chunk in pages.batch.chunks
    ]
    batch = ForwardBatch(chunks, case.block_size)
    num_values = 2 * _HALF + pages.cache.numel()
    try:
        memory = torch.empty(num_values, dtype=case.dtype)  # few pages are used
    except RuntimeError as error:  # by `ulimit -v`, or where the system does not overcommit
        pytest.skip(f"8 GiB of memory cannot be reserved: {error}")
    pool = memory[_HALF:].view(-1, *pages.cache.shape[1:])
    pool[first_slot:] = pages.cache
    kv = pages.own_kv
    pool[torch.from_numpy(batch.slot_mapping).long()] = torch.nan
    # The interpreter would copy the memory onto itself.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    attention = attention_of(case)
    found = attention.run(pages.query, kv, pool, attention.plan(batch, case.dtype))
    assert (found.double() - pages.expected()).abs().max() < TOLERANCE[case.dtype]
    assert torch.equal(pool[first_slot:], pages.cache)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (256, torch.float32),
        *(
            pytest.param(head_dim, dtype, marks=pytest.mark.slow)
            for head_dim in (64, 80, 96, 128, 256)
            for dtype in (torch.float32, torch.float16)
            if (head_dim, dtype) != (256, torch.float32)
        ),
    ],
)
def test_head_sizes(head_dim, dtype):
    check(Case(((37, 3), (65, 1), (40, 40)), head_dim=head_dim, dtype=dtype))


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
    monkeypatch.setattr(attention_plan, "enough_programs", lambda used_rows: 1)
    assert torch.equal(run(pages), by_parts)


def test_three_stages_are_for_few_programs_with_one_set_of_sums():
    assert stages_of(131, 2, merges_segments=False) == 3
    assert stages_of(132, 2, merges_segments=False) == 2
    assert stages_of(131, 4, merges_segments=False) == 2
    assert stages_of(131, 2, merges_segments=True) == 2


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
    """Up to the end of the context, and no key after it."""
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
    for kind in (TritonAttention, PagedAttention):
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


@pytest.mark.parametrize(
    ("element_size", "value_dim", "rows"),
    [
        (2, 128, [16, 16, 32, 64, 64]),
        (2, 512, [16, 16, 32, 32, 32]),
        (4, 64, [16, 16, 32, 64, 64]),
        (4, 128, [16, 16, 32, 32, 32]),
        (4, 256, [16, 16, 16, 16, 16]),
    ],
)
def test_rows_of_a_tile_fit_into_registers(element_size, value_dim, rows):
    """In 4 bytes those of long queries, too: with 64 rows of 256 a thread spills 40 kB."""
    values = ValueSize(value_dim, element_size)
    assert [tile_rows(count, values) for count in (1, 16, 17, 33, 400)] == rows
    prompt = TileShape.of([400], 400, 1, values, invariant=False)
    assert prompt.num_segments is None
    assert prompt.num_rows == (64 if element_size == 2 else rows[-1])
