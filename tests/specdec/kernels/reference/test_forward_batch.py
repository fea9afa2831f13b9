"""Tests of positions and KV slots in a batch, which differ where drafts are a tree."""

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch


def test_the_positions_of_a_chain_are_its_slots():
    batch = ForwardBatch([Chunk([5, 6, 7], 3, [2, 0]), Chunk([8], 0, [1])], block_size=4)
    assert batch.positions.tolist() == batch.slots.tolist() == [3, 4, 5, 0]
    assert batch.slot_mapping.tolist() == [11, 0, 1, 4]


def test_siblings_in_a_tree_share_a_position_and_have_slots_of_their_own():
    tree = Chunk([5, 6, 7], 3, [2, 0], parents=(-1, -1))
    batch = ForwardBatch([tree, Chunk([8], 0, [1])], block_size=4)
    assert batch.positions.tolist() == [3, 4, 4, 0]
    assert batch.slots.tolist() == [3, 4, 5, 0]
    assert batch.slot_mapping.tolist() == [11, 0, 1, 4]
