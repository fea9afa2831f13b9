"""Reference tests: attention to chosen tokens, with equal scores and choices of earlier layers."""

import pytest
import torch

from specdec.kernels.reference import indexed_attention
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.reference.indexed_attention import Index, IndexedAttention
from specdec.types.sharding import HeadShard

BLOCK_SIZE, DIM, RANK, INDEX_DIM, CHOSEN = 4, 10, 7, 6, 5
TABLES = ([3, 0, 5], [4, 1])
LENGTHS = ((11, 3), (7, 7))
"""Context and query of each sequence; the first tokens of one, and the keys of both, are cached."""


def attention():
    (heads,) = HeadShard.all_ranks(3, 3, 1)
    return IndexedAttention(
        heads.sharing_one_key(),
        DIM,
        BLOCK_SIZE,
        torch.device("cpu"),
        scale=0.5,
        latent_rank=RANK,
        num_chosen=CHOSEN,
    )


def expected(query, keys, chosen):
    """Attend with queries [heads, DIM] to the chosen of keys [S, DIM]."""
    weights = (query @ keys[chosen].T * 0.5).softmax(-1)
    return weights @ keys[chosen, -RANK:]


def slots(sequence, length):
    return [
        TABLES[sequence][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(length)
    ]


@pytest.mark.parametrize("mask_elements", [1, 100, 2**24])
def test_queries_attend_to_the_tokens_with_the_best_scores(monkeypatch, mask_elements):
    """Scores are rounded to a few values, so that the first of equal ones decide."""
    monkeypatch.setattr(indexed_attention, "_MASK_ELEMENTS", mask_elements)
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    chunks = [
        Chunk([1] * query, context - query, table)
        for table, (context, query) in zip(TABLES, LENGTHS, strict=True)
    ]
    batch = ForwardBatch(chunks, BLOCK_SIZE)
    model, num_tokens = attention(), len(batch.input_ids)
    cache = random(24, 1, 1, DIM + INDEX_DIM)
    cache[..., DIM:] = cache[..., DIM:].round()
    plan = model.plan(batch, torch.float32)
    for group in plan.groups:
        num_slots = len(group.slots) // len(group.rows)
        assert group.mask.shape == (len(group.rows), 1, group.rows.shape[1], num_slots)
    index = Index(
        random(num_tokens, 9, INDEX_DIM).round(), torch.ones(num_tokens, 9), torch.ones(10, 6)
    )
    model.choose(index, cache, plan)
    layers = []
    for _ in range(2):  # of which the second has the choice of the first
        query, keys = random(num_tokens, 3, DIM), random(num_tokens, 1, 1, DIM)
        layers.append((query, model.run(query, keys, cache, plan), cache.clone()))
    at = 0
    for sequence, (context, length) in enumerate(LENGTHS):
        own = slots(sequence, context)
        for position in range(context - length, context):
            for query, found, after in layers:
                rows = after[own[: position + 1], 0, 0]
                scores = (rows[:, DIM:] @ index.query[at].T).relu().sum(1)
                best = sorted(range(position + 1), key=lambda each: (-scores[each], each))[:CHOSEN]
                want = expected(query[at], rows[:, :DIM], best)
                torch.testing.assert_close(found[at], want, atol=1e-5, rtol=1e-5)
            at += 1
