"""Walks through trees in fixed shapes are those of the host."""

import pytest
import torch

from specdec.sampling.device.device_sampler import DeviceSample
from specdec.sampling.device.device_trees import DeviceTrees, verify_trees
from specdec.types.drafts.draft_tree import path_of, walk
from tests.specdec.walks import WIDTH, chain_of, device_trees, random_drafts, sample_of


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
    expected = verify_trees(sample, chain_of([8, 9], 2, num_kept))
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


@pytest.mark.parametrize(
    ("sampled", "drafts", "num_drafts", "invalid", "expected"),
    [
        ([5, 6, 7], [5, 6], 2, [], 3),
        ([5, 6, 7], [5, 9], 2, [], 2),
        ([5, 6, 7], [9, 6], 2, [], 1),
        ([5, 6, 7], [5, 6], 1, [], 2),  # the second is padding
        ([5, 6, 7], [5, 6], 0, [], 1),
        ([5, 6, 7], [5, 6], 2, [1], 1),
        ([5, 6, 7], [5, 6], 2, [2], 2),
        ([5, 6, 7], [5, 9], 2, [2], 2),  # after the path
        ([5, 6, 7], [5, 6], 2, [0], 0),
    ],
)
def test_chains_are_verified_up_to_the_first_difference(
    sampled, drafts, num_drafts, invalid, expected
):
    is_invalid = torch.tensor([place in invalid for place in range(3)])
    sample = DeviceSample(torch.tensor(sampled), is_invalid)
    chains = chain_of(drafts, num_drafts)
    tokens, counts = verify_trees(sample, chains).chains
    assert counts.tolist() == [expected]
    assert tokens[0, :expected].tolist() == sampled[:expected]


@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_drafts_may_be_kept_by_chance(num_kept):
    sample = DeviceSample(torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.bool))
    chains = chain_of([8, 9], 2, num_kept)
    tokens, counts = verify_trees(sample, chains).chains
    assert tokens[0, : counts[0]].tolist() == [[5], [8, 6], [8, 9, 7]][num_kept]


def test_sequences_without_drafts_have_one_token():
    sample = DeviceSample(torch.tensor([5, 6]), torch.tensor([False, True]))
    none = torch.zeros(2, 0, dtype=torch.int64)
    tokens, counts = verify_trees(sample, DeviceTrees(none, None, *torch.zeros(2, 2).long())).chains
    assert tokens.tolist() == [[5], [6]]
    assert counts.tolist() == [1, 0]
