"""Walks through trees in fixed shapes are those of the host."""

import pytest
import torch

from specdec.sampling.device.device_sampler import DeviceChains, DeviceSample, verify_chains
from specdec.sampling.device.device_trees import DeviceTrees, verify_trees
from specdec.types.drafts.draft_tree import path_of, walk
from tests.specdec.walks import WIDTH, device_trees, random_drafts, sample_of


@pytest.mark.parametrize("seed", range(8))
def test_walks_are_those_of_the_host(seed):
    """Over trees with equal siblings, chains, and empty drafts."""
    drafts, sampled = random_drafts(seed)
    found = verify_trees(sample_of(sampled), device_trees(drafts))
    for row, ((tokens, parents), own) in enumerate(zip(drafts, sampled, strict=True)):
        expected = walk(own, tokens, parents)
        count = int(found.counts[row])
        assert tuple(found.token_ids[row, :count].tolist()) == expected
        places = [0, *(1 + node for node in path_of(tokens, parents, expected[:-1]))]
        assert found.places[row, :count].tolist() == places


@pytest.mark.parametrize("seed", range(8))
def test_new_tokens_end_before_an_invalid_one(seed):
    drafts, sampled = random_drafts(seed)
    generator = torch.Generator().manual_seed(seed)
    is_invalid = torch.rand(len(drafts) * (WIDTH + 1), generator=generator) < 0.25
    found = verify_trees(sample_of(sampled, is_invalid), device_trees(drafts))
    by_row = is_invalid.view(len(drafts), -1)
    for row, ((tokens, parents), own) in enumerate(zip(drafts, sampled, strict=True)):
        expected = walk(own, tokens, parents)
        places = [0, *(1 + node for node in path_of(tokens, parents, expected[:-1]))]
        faults = [place for place, scored in enumerate(places) if by_row[row, scored]]
        count = min(faults, default=len(expected))
        assert int(found.counts[row]) == count
        assert tuple(found.token_ids[row, :count].tolist()) == expected[:count]


@pytest.mark.parametrize("num_kept", [0, 1, 2, -1])
def test_chains_beside_trees_are_verified_as_alone(num_kept):
    """Also where chance decides how many are accepted."""
    drafts = [([8, 9], [-1, 0]), ([5, 6, 7], [-1, -1, 1])]
    sampled = [[8, 4, 3], [6, 1, 7, 2]]
    trees = device_trees(drafts, [num_kept, -1])
    found = verify_trees(sample_of(sampled), trees)
    sample = DeviceSample(torch.tensor(sampled[0]), torch.zeros(3, dtype=torch.bool))
    chains = DeviceChains(torch.tensor([[8, 9]]), torch.tensor([2]), torch.tensor([num_kept]))
    expected = verify_chains(sample, chains)
    count = int(expected.counts)
    assert found.counts.tolist() == [count, 3]
    assert found.token_ids[0, :count].tolist() == expected.token_ids[0, :count].tolist()
    assert found.token_ids[1, :3].tolist() == [6, 7, 2]
    assert found.places[1, :3].tolist() == [0, 2, 3]


def test_a_path_of_64_nodes_is_accepted():
    nodes = torch.arange(64)[None]
    trees = DeviceTrees(nodes, nodes - 1, torch.tensor([64]), torch.tensor([-1]))
    sample = DeviceSample(torch.arange(65), torch.zeros(65, dtype=torch.bool))
    found = verify_trees(sample, trees)
    assert found.counts.tolist() == [65]
    assert found.token_ids[0].tolist() == list(range(65))
    assert found.places[0].tolist() == list(range(65))
