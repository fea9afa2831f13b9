"""Draft logits in the order of the target's vocabulary, on one and several ranks."""

import numpy as np
import pytest
import torch

from specdec.sampling.row_ops import RowOps
from specdec.text.vocab_map import VocabularyMap
from specdec.worker.batch.vocab_remap import VocabRemap
from tests.specdec.fakes import run_ranks

DRAFT_SIZE, TARGET_SIZE, NUM_SHARED = 50, 71, 23


@pytest.fixture
def vocabulary():
    random = np.random.default_rng(4)
    to_target = np.full(DRAFT_SIZE, -1, dtype=np.int32)
    to_draft = np.full(TARGET_SIZE, -1, dtype=np.int32)
    draft_ids = random.choice(DRAFT_SIZE, NUM_SHARED, replace=False)
    target_ids = random.choice(TARGET_SIZE, NUM_SHARED, replace=False)
    to_target[draft_ids], to_draft[target_ids] = target_ids, draft_ids
    return VocabularyMap(to_target, to_draft, has_equal_ids=False)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_target_token_has_the_logit_of_the_draft(vocabulary, size):
    logits = torch.randn(5, DRAFT_SIZE, generator=torch.Generator().manual_seed(1))

    def arranged(group):
        order = VocabRemap(vocabulary, group, torch.device("cpu"), RowOps())
        held = group.share_of(DRAFT_SIZE)
        return order.shard.first_token, order.apply(logits[:, held.start : held.stop])

    ranks = run_ranks(size, arranged)
    assert [first for first, _ in ranks] == [rank * TARGET_SIZE // size for rank in range(size)]
    whole = torch.cat([part for _, part in ranks], dim=1)
    assert whole.shape == (5, TARGET_SIZE)
    for target_id, draft_id in enumerate(vocabulary.target_to_draft):
        if draft_id < 0:
            assert (whole[:, target_id] == -torch.inf).all()
        else:
            assert torch.equal(whole[:, target_id], logits[:, draft_id])
