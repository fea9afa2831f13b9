"""Records of a head's computed pairs, under random rows, drafts, rollbacks and reuse of blocks."""

import random
from unittest.mock import Mock

import pytest
import torch

from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.batch.batch_state import BatchState
from specdec.worker.head import kv as head_kv
from specdec.worker.head.kv import HeadKv

BLOCK_SIZE, NUM_BLOCKS, BLOCKS_EACH = 4, 8, 4
PROMPT = (1, 2, 3, 4, 5)


class Run:
    """One sequence after the other in the same blocks, in random order."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.state = BatchState(BLOCK_SIZE, torch.device("cpu"), range(50))
        self.kv = HeadKv(self.state, NUM_BLOCKS, BLOCK_SIZE, Mock(), first_slot=1)
        self.records = []

    def sequence(self, seq_id):
        table = tuple(self.random.sample(range(NUM_BLOCKS), BLOCKS_EACH))
        admission = SequenceAdmission(seq_id, len(PROMPT), SamplingRules(), PROMPT)
        released = (seq_id - 1,) if seq_id else ()
        self.update(StepInput(0, released, (admission,), (BlockTableDelta(seq_id, 0, table),), ()))
        tokens = [*PROMPT]
        self.store(StepRow(seq_id, 0, PROMPT, 0, True))
        while len(tokens) < BLOCKS_EACH * BLOCK_SIZE - 3:
            new = [self.random.randrange(50) for _ in range(self.random.choice((1, 1, 1, 2)))]
            tokens += new
            self.kv.append_output(seq_id, new)
            if self.random.random() < 0.2 and self.kv.num_missing(seq_id, len(tokens)):
                count = self.random.randint(1, self.kv.num_missing(seq_id, len(tokens)))
                self.kv.note_computed(seq_id, self.kv.pairs(seq_id, count))
            if self.random.random() < 0.1:  # a retry after a token that was not valid
                tokens = tokens[:-1]
            drafts = self.random.choice((0, 0, 0, 2))
            row = (tokens[-1], *[7] * drafts)
            self.store(StepRow(seq_id, len(tokens) - 1, row, drafts, True))

    def update(self, step):
        self.state.update(step)
        self.kv.update(step)

    def store(self, row):
        self.kv.store([row], Mock(), Mock())
        progress = self.kv._sequences[row.seq_id]
        self.records.append(
            (list(self.kv._num_filled), list(progress.token_ids), progress.num_computed)
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_row_that_continues_a_block_needs_no_record(monkeypatch, seed):
    """The short way has the result of the long one, and is taken by most rows."""
    short = Run(seed)
    taken = []
    is_continued_by = head_kv._Progress.is_continued_by
    monkeypatch.setattr(
        head_kv._Progress,
        "is_continued_by",
        lambda *given: taken.append(is_continued_by(*given)) or taken[-1],
    )
    for seq_id in range(6):
        short.sequence(seq_id)
    monkeypatch.setattr(head_kv._Progress, "is_continued_by", lambda *given: False)
    long = Run(seed)
    for seq_id in range(6):
        long.sequence(seq_id)
    assert short.records == long.records
    assert sum(taken) > len(taken) / 4
