"""Partitions of a shared draft worker: disjoint blocks and ids, and what a Router gets back."""

import pytest

from cluster.workers.rank.draft_partition import DraftPartition
from specdec.types.draft_messages import (
    AheadDraft,
    AheadOutput,
    AheadRow,
    Continuation,
    DraftedRow,
    DraftOutput,
    DraftRow,
    DraftStep,
)
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules


def step_of(seq_ids, blocks, released=()):
    return DraftStep(
        7,
        released,
        tuple(SequenceAdmission(each, 3, SamplingRules()) for each in seq_ids),
        tuple(BlockTableDelta(each, 0, blocks) for each in seq_ids),
        tuple(StepRow(each, 0, (1,), 0, False) for each in seq_ids),
        tuple(DraftRow(each, 0, (1,), 2, 1) for each in seq_ids),
        tuple(AheadRow(each, 0, (1,), 0, (1,), 2, 1) for each in seq_ids),
    )


def ids_in(step):
    groups = (step.admitted, step.block_table_deltas, step.rows, step.drafts, step.ahead)
    return {each.seq_id for group in groups for each in group} | set(step.released)


def test_routers_have_disjoint_sequences_and_blocks():
    steps = [
        DraftPartition(index, 3, 5).to_worker(step_of((0, 1, 9), (0, 4))) for index in range(3)
    ]
    ids = [ids_in(each) for each in steps]
    assert all(len(own) == 3 for own in ids)
    assert len(set.union(*ids)) == 9
    blocks = [each.block_table_deltas[0].block_ids for each in steps]
    assert blocks == [(0, 4), (5, 9), (10, 14)]


def test_answers_have_the_ids_of_the_router():
    partition = DraftPartition(1, 3, 5)
    step = partition.to_worker(step_of((4,), (0,)))
    [row], [ahead] = step.drafts, step.ahead
    drafted = partition.to_router(DraftOutput(7, (DraftedRow(row.seq_id, (5,)),)))
    assert drafted == DraftOutput(7, (DraftedRow(4, (5,)),))
    rows = (AheadDraft(ahead.seq_id, (Continuation(0, 5, (6,)),)),)
    assert partition.to_router(AheadOutput(7, rows, share=0.5)).rows[0].seq_id == 4


@pytest.mark.parametrize("block", [-1, 5, 1.5, "1"])
def test_a_block_of_another_router_is_refused(block):
    with pytest.raises(ValueError, match="outside of the 5"):
        DraftPartition(1, 3, 5).to_worker(step_of((4,), (0, block)))


def test_what_a_router_leaves_is_released_once():
    partition = DraftPartition(1, 2, 5)
    first = partition.to_worker(step_of((3, 4), (0,)))
    partition.to_worker(step_of((), (), released=(3,)))
    [left] = partition.release_all().released
    assert left in ids_in(first)
    assert left == partition.to_worker(step_of((4,), (0,))).rows[0].seq_id
    assert DraftPartition(1, 2, 5).release_all().released == ()
