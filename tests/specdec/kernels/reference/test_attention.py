# Modules: specdec.kernels.reference.attention_masks, specdec.kernels.reference.paged_attention
"""Reference tests: paged attention equals its definition for batches of mixed lengths."""

from copy import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels import PagedAttention
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.models.weights.checkpoint import CPU
from specdec.types.sharding import HeadShard

BLOCK_SIZE, HEAD_DIM = 4, 8
(HEADS,) = HeadShard.all_ranks(6, 2, 1)

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40)).map(lambda pair: (max(pair), min(pair))),
    min_size=1,
    max_size=5,
)


class Pages:
    """Sequences of (context length, query length) with blocks in a shuffled cache."""

    def __init__(self, lengths, heads=HEADS, block_size=BLOCK_SIZE):
        self.block_size = block_size
        self.lengths = lengths
        self.heads = heads
        generator = torch.Generator().manual_seed(len(lengths))
        counts = [-(-context // block_size) for context, _ in lengths]
        tables = torch.randperm(sum(counts), generator=generator).split(counts)
        self.slots = [
            table[torch.arange(context) // block_size] * block_size
            + torch.arange(context) % block_size
            for table, (context, _) in zip(tables, lengths, strict=True)
        ]
        chunks = [
            Chunk([0] * query_len, context - query_len, table.tolist())
            for table, (context, query_len) in zip(tables, lengths, strict=True)
        ]
        self.batch = ForwardBatch(chunks, block_size)
        shape = (sum(counts) * block_size, 2, len(heads.kv), HEAD_DIM)
        self.cache = torch.randn(shape, generator=generator)
        self.query = torch.randn(
            len(self.batch.input_ids), len(heads.query), HEAD_DIM, generator=generator
        )

    def of(self, heads):
        """Return one rank's shard of queries and KV."""
        part = copy(self)
        part.heads = heads
        part.query = self.query[:, heads.query]
        part.cache = self.cache[:, :, heads.kv].clone()
        return part

    def run(self, window, kv_start=0):
        attention = PagedAttention(self.heads, HEAD_DIM, self.block_size, CPU)
        plan = attention.plan(self.batch, torch.float32, Visible(window, kv_start))
        kv = self.cache[torch.from_numpy(self.batch.slot_mapping)]
        return attention.run(self.query, kv, self.cache.clone(), plan)

    def expected(self, window, kv_start=0):
        """Attend with each query alone, over its position and `window` - 1 positions before."""
        outputs, token = [], 0
        for slots, (context, query_len) in zip(self.slots, self.lengths, strict=True):
            for position in range(context - query_len, context):
                first = 0 if window is None else max(0, position - window + 1)
                first = max(first, kv_start)
                keys, values = self.cache[slots[first : position + 1]].unbind(1)
                outputs.append(self._attend(self.query[token], keys, values))
                token += 1
        return torch.stack(outputs)

    def _attend(self, query, keys, values):
        repeats = self.heads.heads_per_kv
        keys, values = (each.repeat_interleave(repeats, dim=1) for each in (keys, values))
        scores = torch.einsum("hd,shd->hs", query, keys) / HEAD_DIM**0.5
        return torch.einsum("hs,shd->hd", scores.softmax(-1), values)


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.none() | st.integers(1, 45))
def test_attention_equals_definition(lengths, window):
    pages = Pages(lengths)
    torch.testing.assert_close(pages.run(window), pages.expected(window), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(("kv_start", "block_size"), [(1, 4), (3, 4), (1, 1), (3, 2)])
def test_slots_before_the_first_one_with_kv_are_not_read(window, kv_start, block_size):
    pages = Pages([(40, 36), (4, 1), (9, 5), (30, 1), (20, 17)], block_size=block_size)
    expected = pages.expected(window, kv_start)
    for slots in pages.slots:
        pages.cache[slots[:kv_start]] = float("nan")
    torch.testing.assert_close(pages.run(window, kv_start), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("query_len", [1, 4, 20])
def test_blocks_before_window_are_not_read(query_len):
    pages, window = Pages([(40, query_len), (22, 2)]), 6
    expected = pages.expected(window)
    first_seen = 40 - query_len - window + 1
    num_unseen = first_seen // BLOCK_SIZE * BLOCK_SIZE
    pages.cache[pages.slots[0][:num_unseen]] = float("nan")
    torch.testing.assert_close(pages.run(window), expected, atol=1e-5, rtol=1e-4)
    pages.cache[pages.slots[0][first_seen]] = float("nan")
    assert pages.run(window).isnan().any()


@pytest.mark.parametrize("window", [None, 6])
def test_kv_of_other_sequences_is_never_read(window):
    """A NaN would propagate through a weight of 0, also one in the KV of a rejected draft."""
    lengths = [(40, 1), (33, 4), (34, 2), (61, 20)]
    for bad in range(len(lengths)):
        pages = Pages(lengths)
        expected = pages.expected(window).split([query for _, query in lengths])
        is_read = torch.zeros(len(pages.cache), dtype=torch.bool)
        for index, slots in enumerate(pages.slots):
            is_read[slots] = index != bad
        pages.cache[~is_read] = float("nan")
        outputs = pages.run(window).split([query for _, query in lengths])
        for index, output in enumerate(outputs):
            if index != bad:
                torch.testing.assert_close(output, expected[index], atol=1e-5, rtol=1e-4)


def test_window_of_context_length_needs_no_mask():
    batch = Pages([(9, 1), (9, 1)]).batch
    attention = PagedAttention(HEADS, HEAD_DIM, BLOCK_SIZE, CPU)
    (group,) = attention.plan(batch, torch.float32, Visible(window=9)).groups
    assert group.mask is None
    (group,) = attention.plan(batch, torch.float32, Visible(window=8)).groups
    assert group.mask is not None
    assert len(group.slots) == 2 * 9
    (group,) = attention.plan(batch, torch.float32, Visible(window=5)).groups
    assert len(group.slots) == 2 * 5


@settings(max_examples=20, deadline=None)
@given(SEQUENCES)
def test_ranks_that_divide_a_kv_group_equal_one_rank(lengths):
    """Three groups of three heads on two ranks: both hold the KV head of the middle group."""
    pages = Pages(lengths, HeadShard.all_ranks(9, 3, 1)[0])
    shards = HeadShard.all_ranks(9, 3, 2)
    assert [len(shard.kv) for shard in shards] == [2, 2]
    parts = [pages.of(shard).run(None) for shard in shards]
    torch.testing.assert_close(torch.cat(parts, 1), pages.run(None), atol=1e-5, rtol=1e-4)
