"""A head drafts after the accepted path of a tree, wherever its nodes are in the pass."""

from unittest.mock import Mock

import pytest
import torch

from specdec.kernels.reference.forward_batch import SlotMove
from specdec.models.heads.networks.base import HeadCapabilities
from specdec.types.messages import (
    BlockTableDelta,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifiedRow,
)
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.batch.batch_state import BatchState
from specdec.worker.head.runner import HeadRunner

PARENTS = (-1, -1, 1, 2)
ROW = StepRow(7, 4, (9, 1, 2, 3, 4), 4, True, RowDrafting(parents=PARENTS, num_next=2))
OTHER = StepRow(8, 2, (5,), 0, True, RowDrafting(num_next=2))


@pytest.fixture
def state():
    state = BatchState(4, torch.device("cpu"), range(50))
    admitted = tuple(SequenceAdmission(seq, 2, SamplingRules()) for seq in (7, 8))
    tables = (BlockTableDelta(7, 0, (5, 3, 6)), BlockTableDelta(8, 0, (1,)))
    state.update(StepInput(0, (), admitted, tables, ()))
    return state


@pytest.mark.parametrize(
    ("tokens", "place"), [((6,), 0), ((1, 6), 1), ((2, 6), 2), ((2, 3, 4, 6), 4)]
)
def test_the_hidden_state_is_that_of_the_last_accepted_node(state, monkeypatch, tokens, place):
    head = Mock(num_kv_layers=0, max_draft_tokens=4, target_ids=None, vocab_slice=range(8))
    head.device, head.capabilities = torch.device("cpu"), HeadCapabilities()
    limits = {"num_blocks": 8, "block_size": 4, "max_model_len": 64, "max_pairs": 8}
    runner = HeadRunner(head, state, Mock(), **limits, feature_dtype=torch.float32)
    monkeypatch.setattr(runner, "_extend", lambda *arguments: None)
    hidden = torch.arange(6.0).unsqueeze(1)
    verified = (VerifiedRow(8, (3,)), VerifiedRow(7, tokens))
    runner.draft([OTHER, ROW], Mock(), hidden, verified, ())
    [used] = head.features.call_args[0]
    assert used.flatten().tolist() == [0, 1 + place]


def test_moves_put_the_accepted_path_after_its_base(state):
    moves = state.compaction([OTHER, ROW], {7: (2, 3, 4, 6), 8: (3,)})
    # The nodes 1, 2, 3 are at indices 6, 7, 8 of the sequence, and move to 5, 6, 7.
    assert moves == [SlotMove(14, 13), SlotMove(15, 14), SlotMove(24, 15)]
    assert state.compaction([ROW], {7: (1, 6)}) == []
