"""Steps of a draft model's runner; imports nothing that takes seconds to import."""

import torch

from specdec.config.engine import DraftLimits
from specdec.kernels.cpu import SharedMemory, native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.draft_messages import DraftRow, DraftStep
from specdec.types.messages import BlockTableDelta, SequenceAdmission
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.loading import RankModel, load_draft

TEXT = tuple((29 * i) % 380 + 3 for i in range(9))
LIMITS = DraftLimits(
    num_blocks=64, block_size=4, max_model_len=64, max_catch_up_tokens=16, max_num_seqs=8
)
COUNTS = (5, 1, 4, 3)


def load_runner(directory, group=None, quantization=None, **changes):
    group = group or TensorParallelGroup()
    return load_draft(
        RankModel(directory, "float32", LIMITS, quantization=quantization, **changes), group
    )


def drafts(runner, rules, *, whole=True):
    """Return the drafts of two steps, by sequence, and the sequences of each whole draft.

    There is a sequence for each of the rules. In the second step the target has accepted two draft
    tokens, if there are as many, and added another one.
    """
    calls = []
    if runner.whole_drafts is not None:
        draft = runner.whole_drafts.draft

        def counted(rows):
            calls.append([row.seq_id for row in rows])
            return draft(rows)

        runner.whole_drafts.draft = counted
    if not whole:
        runner.whole_drafts = None
    admitted = tuple(
        SequenceAdmission(index, len(TEXT), SamplingRules(**{"seed": index, **each}), TEXT)
        for index, each in enumerate(rules)
    )
    tables = tuple(
        BlockTableDelta(index, 0, tuple(range(8 * index, 8 * index + 8)))
        for index in range(len(rules))
    )
    counts = [COUNTS[index % len(COUNTS)] for index in range(len(rules))]
    rows = tuple(DraftRow(index, 0, TEXT, count, len(TEXT)) for index, count in enumerate(counts))
    first = runner.draft(DraftStep(0, (), admitted, tables, (), rows)).rows
    next_rows = []
    for row in first:
        known = (*TEXT, *row.token_ids[:2], 17)
        num_run = len(TEXT) + min(len(row.token_ids) - 1, 2)
        next_rows.append(DraftRow(row.seq_id, num_run, known[num_run:], 3, len(known)))
    second = runner.draft(DraftStep(1, (), (), (), (), tuple(next_rows))).rows
    return [[row.token_ids for row in step] for step in (first, second)], calls


def rank_drafts(rank, size, directory, rules, address):
    """Draft on one rank of processes that share memory."""
    torch.set_num_threads(2)
    shared = SharedMemory(native_library(), rank, size, address, timeout_s=30)
    return drafts(load_runner(directory, TensorParallelGroup(rank, size, shared)), rules)
