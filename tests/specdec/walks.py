"""Random drafts with the tokens that the target samples, in the shapes of a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.sampling.device.device_sampler import DeviceSample
from specdec.sampling.device.device_trees import DeviceTrees

WIDTH = 12

Drafts = list[tuple[list[int], list[int]]]
"""Tokens and parents of each sequence."""


def random_drafts(
    seed: int, num_seqs: int = 5, num_tokens: int = 3
) -> tuple[Drafts, list[list[int]]]:
    """Return random trees, a chain and an empty draft over few tokens, and the sampled tokens."""
    generator = torch.Generator().manual_seed(seed)

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    drafts: Drafts = []
    sampled = []
    for index in range(num_seqs):
        count = 0 if index == 1 else below(WIDTH + 1)
        is_chain = index == 2
        parents = [node - 1 if is_chain else below(node + 1) - 1 for node in range(count)]
        drafts.append(([below(num_tokens) for _ in range(count)], parents))
        sampled.append([below(num_tokens) for _ in range(count + 1)])
    return drafts, sampled


def device_trees(drafts: Drafts, num_kept: Sequence[int] | None = None) -> DeviceTrees:
    """Return drafts padded to WIDTH nodes, which are of some sequences accepted by chance."""
    tokens = torch.zeros(len(drafts), WIDTH, dtype=torch.int64)
    parents = torch.full_like(tokens, -1)
    for row, (own, above) in enumerate(drafts):
        tokens[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
        parents[row, : len(own)] = torch.tensor(above, dtype=torch.int64)
    counts = torch.tensor([len(own) for own, _ in drafts])
    kept = torch.full_like(counts, -1) if num_kept is None else torch.tensor(num_kept)
    return DeviceTrees(tokens, parents, counts, kept)


def chain_of(drafts: Sequence[int], num_drafts: int, num_kept: int = -1) -> DeviceTrees:
    """Return one chain of `num_drafts` drafts, padded by the others."""
    of_chain = torch.tensor([num_drafts]), torch.tensor([num_kept])
    return DeviceTrees(torch.tensor([drafts]), None, *of_chain)


def sample_of(
    sampled: Sequence[Sequence[int]], is_invalid: torch.Tensor | None = None
) -> DeviceSample:
    """Return sampled tokens, padded to WIDTH nodes. is_invalid: [B * (WIDTH + 1)] bool."""
    token_ids = torch.zeros(len(sampled), WIDTH + 1, dtype=torch.int64)
    for row, own in enumerate(sampled):
        token_ids[row, : len(own)] = torch.tensor(own)
    none = torch.zeros(token_ids.numel(), dtype=torch.bool)
    return DeviceSample(token_ids.flatten(), none if is_invalid is None else is_invalid)
