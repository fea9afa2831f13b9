"""Verification and compaction on the device equal those of the host."""

import pytest
import torch

from specdec.kernels.forward_batch import SlotMove
from specdec.kernels.triton.moves import compact_paths, move_kv
from specdec.kernels.triton.verify import DeviceDrafts, verify_drafts
from specdec.types.draft_tree import BASE, path_of, walk

WIDTH = 12


def random_drafts(seed, num_seqs=5, num_tokens=3):
    """Return random trees, chains and empty drafts over few tokens, and the sampled tokens."""
    generator = torch.Generator().manual_seed(seed)

    def below(high):
        return int(torch.randint(high, (1,), generator=generator))

    drafts, sampled = [], []
    for index in range(num_seqs):
        count = 0 if index == 1 else below(WIDTH + 1)
        is_chain = index == 2
        parents = [node - 1 if is_chain else below(node + 1) - 1 for node in range(count)]
        drafts.append(([below(num_tokens) for _ in range(count)], parents))
        sampled.append([below(num_tokens) for _ in range(count + 1)])
    return drafts, sampled


def device_drafts(drafts):
    tokens, parents = torch.full((2, len(drafts), WIDTH), 77, dtype=torch.int32)
    counts, starts, end = [], [], 0
    for row, (own, above) in enumerate(drafts):
        tokens[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        parents[row, : len(own)] = torch.tensor(above, dtype=torch.int32)
        counts.append(len(own))
        starts.append(end)
        end += len(own) + 1
    return DeviceDrafts(tokens, parents, *(torch.tensor(each).int() for each in (counts, starts)))


@pytest.mark.parametrize("seed", range(6))
def test_walks_are_those_of_the_host(seed):
    drafts, sampled = random_drafts(seed)
    flat = torch.tensor([token for own in sampled for token in own])
    found = verify_drafts(flat, device_drafts(drafts))
    for row, ((tokens, parents), own) in enumerate(zip(drafts, sampled, strict=True)):
        expected = walk(own, tokens, parents)
        assert tuple(found.token_ids[row, : found.num_tokens[row]].tolist()) == expected
        path = path_of(tokens, parents, expected[:-1])
        assert found.path[row, : len(expected) - 1].tolist() == path


def test_a_tree_of_one_path_accepts_all():
    drafts = [([5, 6, 7], [BASE, 0, 1])]
    found = verify_drafts(torch.tensor([5, 6, 7, 8]), device_drafts(drafts))
    assert found.num_tokens.tolist() == [4]
    assert found.token_ids[0, :4].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("seed", range(3))
def test_accepted_nodes_move_behind_their_base(seed):
    drafts, sampled = random_drafts(seed, num_tokens=2)
    flat = torch.tensor([token for own in sampled for token in own])
    found = verify_drafts(flat, device_drafts(drafts))
    block_size, blocks = 4, 6
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(drafts) * blocks, generator=generator)
    tables = order.view(len(drafts), blocks).int()
    cache = torch.randn(2, order.numel() * block_size, 2, 3, 8, generator=generator)
    first_nodes = torch.tensor([5, 0, 7, 9, 3]).int()
    expected = cache.clone()
    for row, first in enumerate(first_nodes.tolist()):
        slots = [
            int(tables[row, place // block_size]) * block_size + place % block_size
            for place in range(first, first + WIDTH)
        ]
        count = int(found.num_tokens[row]) - 1
        for place, node in enumerate(found.path[row, :count].tolist()):
            expected[:, slots[place]] = cache[:, slots[node]]
    compact_paths(cache, found, first_nodes, tables, block_size)
    assert torch.equal(cache, expected)


def test_moves_run_in_order():
    """A later move may overwrite the source of an earlier one."""
    cache = torch.arange(2 * 8 * 1500.0).view(2, 8, 1500)
    expected = cache.clone()
    expected[:, 1], expected[:, 3] = cache[:, 3], cache[:, 5]
    move_kv(cache, [SlotMove(3, 1), SlotMove(5, 3)])
    assert torch.equal(cache, expected)
