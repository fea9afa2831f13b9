# Modules: specdec.worker.device.state
"""Pending rows: the device takes the drafts that the host puts in their place."""

import random
from collections import Counter

import numpy as np
import torch

from specdec.types.drafts.draft_tree import chain_of, depths, is_chain, nodes_within, subtree
from specdec.types.messages import PENDING_TOKEN, RowDrafting, SequenceAdmission, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.input.input import StepPacker, most_words
from specdec.worker.device.state import DeviceState, DeviceStepLimits
from specdec.worker.device.step_graphs import StepShape
from tests.specdec.trees import random_parents

NUM_ROWS, DEPTH, NUM_NODES = 8, 4, 12
LIMITS = DeviceStepLimits(
    max_num_seqs=NUM_ROWS,
    max_draft_tokens=DEPTH,
    max_model_len=64,
    block_size=4,
    num_blocks=16,
    max_tree_nodes=NUM_NODES,
    max_tree_depth=DEPTH,
)
SHAPE = StepShape(NUM_ROWS, 1 + NUM_NODES, 16, has_trees=True)


def random_draft(generator):
    """Return tokens and parents that a head may have drafted: of a tree, a chain or nothing."""
    if generator.random() < 0.4:
        return tuple(range(100, 100 + generator.randrange(1 + DEPTH))), None
    parents = random_parents(generator, generator.randrange(2, 1 + NUM_NODES), width=0.8)
    parents = subtree(parents, nodes_within(parents, DEPTH))
    return tuple(range(100, 100 + len(parents))), parents


def random_row(generator, seq_id):
    """Return a row that wants a tree, a chain or nothing, with more or less room for it."""
    wanted = generator.randrange(1 + NUM_NODES)
    held_depth = DEPTH if wanted > DEPTH else 0
    max_end = 32 + generator.randrange(16)
    drafting = RowDrafting(num_held=wanted, held_depth=held_depth)
    return StepRow(seq_id, 40, (PENDING_TOKEN,), 0, True, drafting, max_end=max_end)


def hold(state, sequence, draft, place):
    """Store a draft on the device as growth does, and on the host as its result is read."""
    (tokens, parents), first = draft, chain_of(*draft)
    state.num_tokens[place], state.last_tokens[place] = sequence.num_tokens, sequence.last_token
    state.held_drafts[place, : 1 + len(first)] = torch.tensor([len(first), *first])
    is_tree = parents is not None and not is_chain(parents)
    if parents is not None:
        nodes = state.held_trees[place]
        nodes[: 1 + len(tokens)] = torch.tensor([len(tokens), *tokens])
        nodes[1 + NUM_NODES : 1 + NUM_NODES + len(tokens)] = torch.tensor(parents)
    sequence.held_draft, sequence.held_parents = tokens, parents if is_tree else None


def pending_rows(generator, state):
    """Return random rows and the states of their sequences, whose drafts are held."""
    rows = [random_row(generator, seq_id) for seq_id in range(NUM_ROWS)]
    sequences = []
    for row in rows:
        admission = SequenceAdmission(row.seq_id, 5, SamplingRules(), ())
        sequence = SequenceState.of(admission, range(200))
        sequence.num_tokens, sequence.last_token = generator.randrange(25, 36), row.seq_id
        assert state.has_place(row.seq_id)
        hold(state, sequence, random_draft(generator), state.place(row.seq_id))
        sequences.append(sequence)
    return rows, sequences


def unpacked(state, rows, sequences):
    packer = StepPacker(LIMITS, state, holds_drafts=True)
    words = np.zeros(most_words(LIMITS), np.int64)
    packer.pack(words, StepColumns(rows), sequences, SHAPE, [-1] * NUM_ROWS)
    return packer.unpack(torch.from_numpy(words), SHAPE)


def test_the_device_takes_the_drafts_that_the_host_takes():
    generator, kinds = random.Random(0), Counter()
    for _ in range(10):
        state = DeviceState(LIMITS, torch.device("cpu"))
        rows, sequences = pending_rows(generator, state)
        packed = unpacked(state, rows, sequences)
        for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            own = sequence.resolved(row)
            count = own.num_draft_tokens
            found = [column[index].item() for column in (packed.starts, packed.first)]
            assert found == [own.num_computed_tokens, own.token_ids[0]]
            assert packed.num_drafts[index] == count
            assert tuple(packed.drafts[index, :count].tolist()) == own.drafts
            parents = own.drafting.parents or range(-1, count - 1)
            assert packed.trees.parents[index, :count].tolist() == list(parents)
            assert packed.trees.depths[index, 1 : 1 + count].tolist() == depths(parents)
            kinds["tree" if own.drafting.parents else "chain" if count else "none"] += 1
    assert min(kinds[each] for each in ("tree", "chain", "none")) > 5
