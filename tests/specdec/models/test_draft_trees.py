"""Trees of drafts in a forward pass: each node's logits are those of the chain that is its path."""

import random

import pytest
import torch

from specdec.config.quantization import CPU_QUANTIZATION_METHODS as QUANTIZED
from specdec.kernels.cpu import native_library
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, SlotMove
from specdec.types.drafts.draft_tree import paths
from tests.specdec.models.sequences import NUM_TOKENS, Sequences, load, texts
from tests.specdec.models.test_cpu_decoder import DTYPES, save
from tests.specdec.threads import num_threads
from tests.specdec.trees import chain_of, random_parents

needs_native = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
BASES = [0, 14, 15, 16, 100, 247, 255, 256, 290, 505]
"""Around the bounds of vectors and of KV splits, and beyond an attention window of 300."""


@pytest.fixture(scope="module", params=["mistral-window", "wide", "deepseek-v3"])
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    save(directory, request.param)
    return directory


class Trees(Sequences):
    """Sequences whose last tokens may be a tree."""

    @torch.inference_mode()
    def run_trees(self, *parts):
        """Run parts (sequence, token_ids, start, parents); return the logits of each."""
        chunks = [Chunk(ids, at, self.tables[index], tree) for index, ids, at, tree in parts]
        hidden = self.model(ForwardBatch(chunks, self.block_size), self.cache)
        return self.model.compute_logits(hidden).split([len(ids) for _, ids, _, _ in parts])

    def slot(self, index, position):
        block, offset = divmod(position, self.block_size)
        return self.tables[index][block] * self.block_size + offset


def check_tree(model, block_size, base, parents, assert_equal):
    """Compare the nodes after text[base] with chains, and go on after the longest path."""
    text, tokens = texts(2)[0], texts(2)[1][: len(parents)]
    trees = Trees(model, block_size, count=2)
    start = max(0, base - 2)
    if start:
        trees.run((0, text[:start], 0))
    row = (0, [*text[start : base + 1], *tokens], start, parents)
    other = (1, text[:40], 0, None)
    found = trees.run_trees(other, row)[1][base - start :]
    plain = Sequences(model, block_size)
    for node in (-1, *range(len(parents))):
        chain = chain_of(text, base, tokens, parents, node) if node >= 0 else text[: base + 1]
        expected = (
            plain.run((0, chain, 0))[0]
            if node in (-1, 0)
            else plain.run((0, chain[base + 1 :], base + 1))[0]
        )
        assert_equal(found[node + 1], expected[-1])
    path = max(paths(parents), key=len)
    moves = [
        SlotMove(trees.slot(0, base + 1 + node), trees.slot(0, base + 1 + place))
        for place, node in enumerate(path)
        if node != place
    ]
    if moves:
        model.move_kv(trees.cache, moves)
    chain = chain_of(text, base, tokens, parents, path[-1])
    after = trees.run((0, [7], len(chain)))[0][0]
    expected = Sequences(model, block_size).run((0, [*chain, 7], 0))[0][-1]
    assert_equal(after, expected)


def assert_same_bits(found, expected):
    assert torch.equal(found, expected)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("block_size", "base"), [(4, 254), (16, 14), (16, 305)])
def test_native_nodes_have_the_bits_of_chains(directory, quantization, block_size, base):
    model = load(directory, block_size, quantization=quantization)
    check_tree(model, block_size, base, random_parents(random.Random(base), 20), assert_same_bits)


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        *((dtype, None) for dtype in DTYPES),
        *((DTYPES[0], each) for each in QUANTIZED),
    ],
)
@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_native_nodes_have_the_bits_of_chains_at_all_bounds(
    directory, dtype, quantization, block_size
):
    model = load(directory, block_size, dtype, quantization=quantization)
    generator = random.Random(block_size)
    for base in BASES:
        parents = random_parents(generator, generator.choice([2, 9, 16, 40, 64]))
        check_tree(model, block_size, base, parents, assert_same_bits)


@needs_native
@pytest.mark.parametrize("count", [2, 3])
def test_native_nodes_do_not_depend_on_the_number_of_threads(directory, count):
    model, generator = load(directory, 16), random.Random(count)
    with num_threads(count):
        check_tree(model, 16, 250, random_parents(generator, 24), assert_same_bits)


@pytest.mark.parametrize(
    ("block_size", "sizes"), [(4, ((0, 64), (15, 3))), (16, ((15, 3), (300, 30)))]
)
def test_torch_nodes_are_those_of_chains(directory, block_size, sizes):
    """sizes: length of the text before each tree, and number of its nodes."""
    model, generator = load(directory, block_size, kernels="torch"), random.Random(3)
    for base, count in sizes:
        check_tree(model, block_size, base, random_parents(generator, count), assert_close)


@pytest.mark.parametrize("name", ["llama4", "gemma4", "deepseek-v3.2"])
@pytest.mark.parametrize("base", [5, 20])
def test_nodes_see_what_their_positions_see(tmp_path, name, base):
    """Chunks of 7 tokens that begin within a tree, KV of earlier layers, and 11 chosen tokens."""
    save(tmp_path, name)
    model = load(tmp_path, 4, kernels="torch")
    check_tree(model, 4, base, random_parents(random.Random(base), 12), assert_close)


def test_texts_are_longer_than_the_trees_reach():
    assert max(BASES) + 64 + 2 <= NUM_TOKENS


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize(("block_size", "base"), [(4, 254), (16, 14), (16, 305)])
def test_a_tree_may_run_in_several_passes(directory, kernels, block_size, base):
    """Its last nodes attend to the KV of the first ones, as in one pass."""
    model = load(directory, block_size, kernels=kernels)
    text, tokens = texts(2)[0], texts(2)[1][:20]
    parents = random_parents(random.Random(base), 20)
    whole, parts = (Trees(model, block_size, count=2) for _ in range(2))
    for each in (whole, parts):
        each.run((0, text[:base], 0))
    start = base + 1  # of the nodes
    expected = whole.run_trees((0, [text[base], *tokens], base, parents))[0][1:]
    found = list(parts.run_trees((0, [text[base], *tokens[:7]], base, parents[:7]))[0][1:])
    for first, end in ((7, 8), (8, 20)):
        row = (0, tokens[first:end], start + first, parents[:end])
        found += parts.run_trees((1, text[:9], 0, None), row)[1]
    check = assert_same_bits if kernels == "native" else assert_close
    check(torch.stack(found), expected)
