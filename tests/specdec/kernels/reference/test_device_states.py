"""Plans of rows on the device are those that the host makes of the same passes."""

import random

import pytest
import torch

from specdec.kernels.reference.device_states import DeviceStatePool, StateRows
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.reference.state_pool import StatePool

NUM_SLOTS, MAX_GUESSES = 5, 4


def pool_of(kind):
    sizes = {"num_slots": NUM_SLOTS, "max_guesses": MAX_GUESSES, "num_snapshots": 1}
    return kind(2, 3, 6, (2, 3, 4), **sizes, dtype=torch.float32, device=torch.device("cpu"))


def random_chunks(generator, starts):
    """Return a row of some slots: the first tokens of a prompt, or one after accepted drafts."""
    chunks = []
    for slot in generator.sample(range(NUM_SLOTS), generator.randrange(1, 1 + NUM_SLOTS)):
        guesses = generator.randrange(1 + MAX_GUESSES)
        known = generator.randrange(1, 20) if generator.random() < 0.3 else 1
        chunks.append(
            Chunk([0] * (known + guesses), starts[slot], [0], num_guesses=guesses, state_slot=slot)
        )
        starts[slot] += known + generator.randrange(1 + guesses)
    return chunks


def test_histories_have_the_plans_of_the_host():
    generator = random.Random(4)
    host, device = pool_of(StatePool), pool_of(DeviceStatePool)
    starts = [0] * NUM_SLOTS
    for _ in range(200):
        if generator.random() < 0.1:
            slot = generator.randrange(NUM_SLOTS)
            starts[slot] = 0
            host.reset(slot)
            device.reset(slot)
        batch = ForwardBatch(random_chunks(generator, starts), 4)
        expected, found = host.plan(batch), device.plan_batch(batch)
        firsts = [int(first) for first in batch.cu_seqlens_q[:-1]]
        assert found.spans.tolist() == [
            [
                *(span.slot, first, span.num_replayed, span.num_tokens),
                *(span.num_committed, span.num_kept),
            ]
            for span, first in zip(expected.spans, firsts, strict=True)
        ]
        assert found.num_mixed == len(batch.chunks) * MAX_GUESSES + batch.num_tokens


@pytest.mark.parametrize(("start", "num_replayed"), [(4, 0), (9, 4)])
def test_a_row_that_begins_elsewhere_replays_what_there_is(start, num_replayed):
    """As after invalid logits; nothing uses its results."""
    pool = pool_of(DeviceStatePool)
    pool.committed[1] = 5
    plan = pool.plan_rows(StateRows(*map(torch.tensor, ([1], [0], [1], [start], [0]))), 1)
    assert plan.spans.tolist() == [[1, 0, num_replayed, 1, num_replayed + 1, 0]]
    assert pool.committed[1] == start + 1


def test_a_snapshot_has_its_position():
    pool = pool_of(DeviceStatePool)
    for slot in (0, 2):
        pool.reset(slot)
    pool.plan_batch(ForwardBatch([Chunk([0] * 8, 0, [0], state_slot=0)], 4))
    pool.inputs[:, 0], pool.memory[:, 0] = 1.0, 2.0
    pool.save(0, 0, 8)
    pool.resume(2, 0, 8)
    pool.save(2, 0, 8)
    assert pool.committed.tolist() == [8, 0, 8, 0, 0, 0]
    assert torch.equal(pool.memory[:, 2], pool.memory[:, 0])
    assert torch.equal(pool.inputs[:, 2, :3], pool.inputs[:, 0, :3])
