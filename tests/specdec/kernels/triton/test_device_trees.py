"""Attention to trees whose batches are made on the device, by Triton's kernels and by torch's."""

from dataclasses import replace

import pytest
import torch

from specdec.config.gpu.attention_splits import most_rows
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.attention_masks import mask_nodes
from specdec.kernels.reference.device_batch import DeviceBatch, TreeNodes
from specdec.kernels.reference.paged_attention import PagedAttention
from specdec.kernels.triton import attention_plan
from specdec.kernels.triton.attention import TritonAttention
from specdec.models.weights.checkpoint import CPU
from specdec.types.drafts.draft_tree import ancestors, depths, signed_words
from tests.specdec.kernels.triton.pages import Case, Pages
from tests.specdec.kernels.triton.test_ragged_attention import ragged

DEEP = (-1, -1, 1, 2, 3, 0, 4)
WIDE = (-1, -1, -1, 0, 1)
LENGTHS = ((40, 8), (30, 3), (9, 1), (26, 6))
TREES = {0: DEEP, 3: WIDE}


def nodes_of(pages, num_empty=0):
    """Return the trees of pages, and empty sequences after them."""
    batch, case = pages.batch, pages.case
    words = torch.zeros(batch.num_tokens, dtype=torch.int64)
    contexts = torch.from_numpy(batch.context_lens).long()
    first_nodes = torch.cat([contexts, torch.ones(num_empty, dtype=torch.int64)])
    positions = torch.full((len(first_nodes), 7), 77)
    for index, parents in case.trees.items():
        end, size = int(batch.cu_seqlens_q[index + 1]), len(parents)
        words[end - size : end] = torch.tensor(signed_words(ancestors(parents)))
        first_nodes[index] -= size
        positions[index, :size] = first_nodes[index] - 1 + torch.tensor(depths(parents))
    return TreeNodes(words, first_nodes, positions)


def check(case, make):
    """Compare the attention of the batch that `make` returns, and the tokens in it."""
    pages = Pages(case)
    batch, tokens = make(pages)
    expected = pages.expected()[tokens]
    for kind in (TritonAttention, PagedAttention):
        attention = kind(case.heads, case.head_dim, case.block_size, CPU)
        plan = attention.plan_on_device(batch, case.dtype, Visible(case.window))
        index = torch.full((len(batch.input_ids),), 0)
        index[: len(tokens)] = tokens
        kv = pages.own_kv[index]
        is_padding = batch.slot_mapping == pages.free_slot
        kv[is_padding] = torch.nan
        found = attention.run(pages.query[index], kv, pages.cache.clone(), plan)
        is_compared = ~is_padding[: len(tokens)]
        found = found[: len(tokens)][is_compared].double()
        assert (found - expected[is_compared]).abs().max() < 2e-6


def fixed(pages):
    """Return the pages as rows of eight tokens; missing ones are padding."""
    places = [[*range(8)], [8, 9, 10, *[10] * 5], [11] * 8, [*range(12, 18), 17, 17]]
    tokens = torch.tensor(places).flatten()
    is_padding = torch.cat([torch.tensor([False]), tokens[1:] == tokens[:-1]])
    own, trees = pages.batch, nodes_of(pages)
    slots = torch.from_numpy(own.slot_mapping).long()[tokens]
    words = trees.words[tokens].masked_fill(is_padding, 0)
    batch = DeviceBatch(
        input_ids=torch.zeros(len(tokens), dtype=torch.int64),
        positions=torch.from_numpy(own.positions).long()[tokens],
        slot_mapping=slots.masked_fill(is_padding, pages.free_slot),
        block_tables=torch.from_numpy(own.block_tables).long(),
        context_lens=torch.from_numpy(own.context_lens).long(),
        query_len=8,
        trees=replace(trees, words=words),
    )
    return batch, tokens


def mixed(pages):
    """Return the pages as a ragged batch with padding and empty sequences at the end."""
    trees, padding = nodes_of(pages, num_empty=2), torch.zeros(3, dtype=torch.int64)
    trees = replace(trees, words=torch.cat([trees.words, padding]))
    return replace(ragged(pages), trees=trees), torch.arange(pages.batch.num_tokens)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("make", [fixed, mixed])
def test_trees_beside_chains_and_decodes(make, window):
    check(Case(LENGTHS, window=window, trees=TREES), make)


def test_trees_after_a_prompt_of_the_same_step():
    check(Case(((40, 30), *LENGTHS[1:]), trees=TREES), mixed)


def test_contexts_in_parts(monkeypatch):
    lengths = ((300, 8), *LENGTHS[1:])
    check(Case(lengths, num_heads=2, kv_heads=1, trees=TREES), fixed)
    monkeypatch.setattr(attention_plan, "enough_programs", lambda used_rows: 1)
    check(Case(lengths, num_heads=2, kv_heads=1, trees=TREES), fixed)


def test_contexts_of_large_trees_are_split():
    """Their programs are few; a prompt of as many tokens would have no segments."""
    parents = tuple(node // 2 - 1 for node in range(19))
    case = Case(((600, 20),), num_heads=2, kv_heads=1, trees={0: parents})
    pages = Pages(case)
    own = pages.batch
    words = torch.tensor([0, *signed_words(ancestors(parents))])
    nodes = 580 + torch.tensor([depths(parents)])
    batch = DeviceBatch(
        input_ids=torch.zeros(20, dtype=torch.int64),
        positions=torch.from_numpy(own.positions).long(),
        slot_mapping=torch.from_numpy(own.slot_mapping).long(),
        block_tables=torch.from_numpy(own.block_tables).long(),
        context_lens=torch.tensor([600]),
        query_len=20,
        trees=TreeNodes(words, torch.tensor([581]), nodes),
    )
    attention = TritonAttention(case.heads, case.head_dim, case.block_size, CPU)
    plan = attention.plan_on_device(batch, case.dtype)
    [tiles] = plan.launches
    assert tiles.parts is not None
    assert tiles.shape.used_rows <= most_rows(2, case.head_dim, 20)
    found = attention.attend(pages.query, pages.cache, plan)
    assert (found.double() - pages.expected()).abs().max() < 2e-6


def test_the_last_of_64_nodes_hides_what_comes_after_it():
    """Its bit is the sign of the word; slots after the context have no bit."""
    words = torch.tensor([signed_words(ancestors(range(-1, 63)))[-1]])
    is_masked = mask_nodes(torch.zeros(1, 1, 70, dtype=torch.bool), words[None], torch.tensor([4]))
    assert is_masked[0, 0].tolist() == [False] * 68 + [True] * 2
    trees = TreeNodes(words, torch.tensor([4]), 4 + torch.arange(64)[None])
    [near] = trees.within(3, torch.tensor([67]), torch.tensor([0])).tolist()
    assert near % 2**64 == 0b111 << 61
