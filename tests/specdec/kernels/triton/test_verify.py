# Modules: specdec.kernels.triton.device.verify, specdec.kernels.triton.moves
"""Verification and compaction by kernels equal those of their references."""

import pytest
import torch

from specdec.kernels.backend import KernelBackend
from specdec.kernels.moves import AcceptedPaths, move_kv
from specdec.kernels.reference.forward_batch import SlotMove
from specdec.sampling.device.device_sampler import DeviceSample
from specdec.sampling.device.device_trees import DeviceTrees
from specdec.sampling.row_ops import RowOps, TritonRowOps
from tests.specdec.walks import WIDTH, device_trees, random_drafts, sample_of

TORCH, TRITON = RowOps(), TritonRowOps()


@pytest.mark.parametrize("seed", range(6))
def test_walks_are_those_of_the_reference(seed):
    drafts, sampled = random_drafts(seed)
    generator = torch.Generator().manual_seed(seed)
    is_invalid = torch.rand(len(drafts) * (WIDTH + 1), generator=generator) < 0.1 * (seed % 3)
    num_kept = [-1, 0, min(seed, len(drafts[2][0])), -1, -1]
    arguments = sample_of(sampled, is_invalid), device_trees(drafts, num_kept)
    found, expected = TRITON.verify_trees(*arguments), TORCH.verify_trees(*arguments)
    assert found.counts.tolist() == expected.counts.tolist()
    for row, count in enumerate(expected.counts.tolist()):
        assert found.token_ids[row, :count].tolist() == expected.token_ids[row, :count].tolist()
        assert found.places[row, :count].tolist() == expected.places[row, :count].tolist()


@pytest.mark.parametrize("seed", range(2))
def test_chains_are_those_of_the_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"size": (6, 4), "generator": generator}
    drafts, sampled = torch.randint(2, **sizes), torch.randint(2, (30,), generator=generator)
    is_invalid = torch.rand(30, generator=generator) < 0.1
    num_drafts, num_kept = torch.tensor([4, 3, 0, 4, 4, 2]), torch.tensor([-1, -1, -1, 4, 0, 1])
    arguments = DeviceSample(sampled, is_invalid), DeviceTrees(drafts, None, num_drafts, num_kept)
    found, expected = TRITON.verify_trees(*arguments), TORCH.verify_trees(*arguments)
    assert found.counts.tolist() == expected.counts.tolist()
    for row, count in enumerate(expected.counts.tolist()):
        assert found.token_ids[row, :count].tolist() == expected.token_ids[row, :count].tolist()


def test_sequences_without_drafts_have_one_token():
    sample = DeviceSample(torch.tensor([5, 6]), torch.tensor([False, True]))
    none = torch.zeros(2, 0, dtype=torch.int64)
    found = TRITON.verify_trees(sample, DeviceTrees(none, None, *torch.zeros(2, 2).long()))
    assert found.counts.tolist() == [1, 0]
    assert found.token_ids[0].tolist() == [5]


def test_strided_rows_are_read_where_they_are():
    """A step's drafts are columns of its packed input."""
    drafts, sampled = random_drafts(0)
    trees, sample = device_trees(drafts), sample_of(sampled)
    wide = torch.full((len(drafts), 3, WIDTH + 2), 77)
    wide[:, 0, 1 : WIDTH + 1], wide[:, 1, 1 : WIDTH + 1] = trees.token_ids, trees.parents
    columns = wide[:, 0, 1 : WIDTH + 1], wide[:, 1, 1 : WIDTH + 1]
    of_rows = torch.stack([trees.num_nodes, trees.num_kept], 1).unbind(1)
    strided = DeviceTrees(*columns, *of_rows)
    found = TRITON.verify_trees(sample, strided)
    assert found.counts.tolist() == TORCH.verify_trees(sample, trees).counts.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
@pytest.mark.parametrize("seed", range(2))
def test_accepted_nodes_move_after_their_base(seed, dtype):
    drafts, sampled = random_drafts(seed, num_tokens=2)
    verified = TORCH.verify_trees(sample_of(sampled), device_trees(drafts))
    block_size, blocks = 4, 6
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(drafts) * blocks, generator=generator)
    tables = order.view(len(drafts), blocks)
    places = torch.randperm(len(drafts), generator=generator)
    size = (2, order.numel() * block_size + 1, 2, 3, 8)
    cache = torch.randn(size, generator=generator).to(dtype)
    bases = torch.tensor([4, 0, 6, 8, 2])
    paths = AcceptedPaths(verified.places, verified.counts, bases, tables, places, block_size)
    expected = cache.clone()
    for row, base in enumerate(bases.tolist()):
        table = tables[places[row]].tolist()
        slots = [
            table[place // block_size] * block_size + place % block_size
            for place in range(base, base + WIDTH + 1)
        ]
        for new, old in enumerate(verified.places[row, : int(verified.counts[row])].tolist()):
            expected[:, slots[new]] = cache[:, slots[old]]
    assert not torch.equal(expected.float(), cache.float())
    for ops in (TORCH, TRITON):
        moved = cache.clone()
        ops.move(moved, ops.path_moves(paths))
        assert torch.equal(moved.view(torch.uint8), expected.view(torch.uint8))


def test_moves_run_in_order():
    """A later move may overwrite the source of an earlier one."""
    cache = torch.arange(2 * 8 * 1500.0).view(2, 8, 1500)
    expected = cache.clone()
    expected[:, 1], expected[:, 3] = cache[:, 3], cache[:, 5]
    move_kv(cache, [SlotMove(3, 1), SlotMove(5, 3)], KernelBackend.TRITON)
    assert torch.equal(cache, expected)
