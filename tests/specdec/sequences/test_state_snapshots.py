"""Positions that are worth a snapshot, and the slots of snapshots beside the blocks they need."""

import pytest

from specdec.sequences.block_manager import BlockManager, root_key
from specdec.sequences.state_snapshots import LEAST_SAVED_BLOCKS, StateSnapshots
from specdec.types.messages import Snapshot

BLOCK_SIZE, INTERVAL = 2, 8
LONG = list(range(60))


def manager(num_slots=4, num_blocks=100):
    snapshots = StateSnapshots(num_slots, INTERVAL, BLOCK_SIZE)
    return BlockManager(num_blocks, BLOCK_SIZE, snapshots=snapshots)


def run(blocks, seq_id, tokens, salt="", *, release=True, budget=1000):
    """Compute a sequence in chunks and then token by token; return the positions that are saved.

    Its first position is that of its resumption.
    """
    keys = [root_key(salt)]
    start = blocks.admit(seq_id, tokens, len(tokens), keys)
    resumed, positions = blocks.resumption(seq_id), []
    assert start == (resumed.position if resumed else 0)
    blocks.snapshots.sent(seq_id)
    end = start
    while end < len(tokens):
        end += blocks.snapshots.cut(seq_id, end, min(budget, len(tokens) - end))
        slot = None if end % BLOCK_SIZE else blocks.snapshots.begin_save(seq_id, end)
        blocks.publish(seq_id, tokens, end)
        if slot is not None:
            positions.append(end)
            blocks.end_save(seq_id, slot, keys[end // BLOCK_SIZE])
        blocks.check_integrity()
    if release:
        blocks.release(seq_id)
    return start, positions


def test_a_prompt_is_saved_at_intervals_and_at_its_end():
    assert run(manager(), 1, LONG[:45]) == (0, [16, 32, 44])


def test_the_end_of_a_prompt_is_not_saved_a_few_blocks_after_another_snapshot():
    least = LEAST_SAVED_BLOCKS * BLOCK_SIZE
    assert run(manager(), 1, LONG[: 31 + least]) == (0, [16, 32])
    assert run(manager(), 1, LONG[: 33 + least]) == (0, [16, 32, 32 + least])
    assert run(manager(), 1, LONG[: least - 1]) == (0, [])


@pytest.mark.parametrize("budget", [1, 3, 7, 100])
def test_chunks_of_any_length_end_at_the_same_snapshots(budget):
    assert run(manager(), 1, LONG[:45], budget=budget)[1] == [16, 32, 44]


def test_a_prefix_is_resumed_from_its_last_snapshot_with_the_same_salt_alone():
    blocks = manager()
    run(blocks, 1, LONG[:45])
    assert run(blocks, 2, LONG[:45]) == (44, [])
    assert run(blocks, 3, [*LONG[:40], 99])[0] == 32
    assert run(blocks, 4, LONG[:45], "salt") == (0, [16, 32, 44])


def test_the_end_of_a_shared_prefix_is_saved_once_it_is_known():
    blocks = manager(num_slots=10)
    run(blocks, 1, LONG[:50])
    others = [[*LONG[:26], *[place] * 10] for place in range(70, 73)]
    assert run(blocks, 2, others[0]) == (16, [26, 34])
    assert run(blocks, 3, others[1])[0] == 26
    assert blocks.snapshots._counts.num_stateless_tokens == 10
    assert blocks.snapshots._counts.num_resumed_tokens == 16 + 26


def decode(blocks, seq_id, tokens, first):
    """Compute the tokens after the first ones of an admitted sequence; return saved positions."""
    keys, positions = blocks._chains[seq_id], []
    for end in range(first, len(tokens)):
        assert blocks.reserve(seq_id, end + 1)
        slot = None if end % BLOCK_SIZE else blocks.snapshots.begin_save(seq_id, end)
        blocks.publish(seq_id, tokens, end)
        if slot is not None:
            positions.append(end)
            blocks.end_save(seq_id, slot, keys[end // BLOCK_SIZE])
    return positions


def test_the_last_snapshot_of_an_output_replaces_the_one_before():
    blocks = manager(num_slots=10)
    assert run(blocks, 1, LONG[:13], release=False)[1] == [12]
    assert decode(blocks, 1, LONG[:50], 13) == [20, 28, 36, 44]
    assert len(blocks.snapshots) == 2  # that of the prompt, and the last one
    blocks.release(1)
    assert run(blocks, 2, LONG[:50])[0] == 44
    assert run(blocks, 3, LONG[:30])[0] == 12


def test_a_snapshot_of_an_output_that_was_used_is_not_replaced():
    blocks = manager(num_slots=10)
    run(blocks, 1, LONG[:13], release=False)
    decode(blocks, 1, LONG[:24], 13)
    assert run(blocks, 2, LONG[:25])[0] == 20
    decode(blocks, 1, LONG[:50], 24)
    assert run(blocks, 3, LONG[:25])[0] == 20


def test_a_snapshot_is_dropped_with_its_block():
    blocks = manager(num_blocks=24)
    run(blocks, 1, LONG[:45])
    assert len(blocks.snapshots) == 3
    for num_taken, num_kept in ((6, 2), (24, 0)):
        assert blocks.reserve(2, 2 * num_taken)
        blocks.release(2)
        blocks.check_integrity()
        assert len(blocks.snapshots) == num_kept


def test_the_least_recently_used_snapshot_is_replaced():
    blocks = manager(num_slots=2)
    first, second, third = ([place] * 20 for place in (1, 2, 3))
    run(blocks, 1, first)
    run(blocks, 2, second)
    run(blocks, 3, first)
    run(blocks, 4, third)
    kept = [run(blocks, 5 + place, each)[0] for place, each in enumerate((first, third))]
    assert kept == [16, 16]
    assert run(blocks, 7, second)[0] == 0


def test_a_snapshot_that_ranks_have_yet_to_read_is_not_replaced():
    blocks = manager(num_slots=1)
    run(blocks, 1, LONG[:20])
    blocks.admit(2, LONG[:20], 20, [root_key()])
    assert run(blocks, 3, [9] * 20)[1] == []
    assert blocks.resumption(2) == Snapshot(0, 16)
    blocks.snapshots.sent(2)
    assert run(blocks, 4, [9] * 20)[1] == [16]


def test_invalid_states_and_those_without_a_block_are_not_kept():
    blocks = manager()
    blocks.admit(1, LONG[:20], 20, [root_key()])
    for position, key in ((16, None), (16, b"of no block")):
        slot = blocks.snapshots.begin_save(1, position)
        blocks.check_integrity()
        blocks.end_save(1, slot, key)
        blocks.snapshots._sequences[1].num_saved = 0
    assert len(blocks.snapshots) == 0
    blocks.check_integrity()


def test_all_snapshots_are_dropped_with_the_cache():
    blocks = manager(num_slots=1)
    blocks.admit(1, LONG[:20], 20, [root_key()])
    assert blocks.snapshots.begin_save(1, 16) == 0
    blocks.release(1)
    blocks.clear()
    blocks.check_integrity()
    assert run(blocks, 2, LONG[:20]) == (0, [16])


def test_without_slots_no_chunk_is_cut():
    assert run(manager(num_slots=0), 1, LONG[:45]) == (0, [])
    blocks = manager(num_slots=0)
    blocks.admit(1, LONG, 60, [root_key()])
    assert blocks.snapshots.cut(1, 0, 60) == 60


def test_a_block_without_a_holder_is_published_in_place_of_its_duplicate():
    """So that a prefix is in the cache as long as the last sequence that had it needs."""
    blocks = manager(num_blocks=40)
    run(blocks, 1, LONG[:30])
    other = [*LONG[:26], 99, 98, 97]
    run(blocks, 2, other, release=False)
    table = blocks.block_table(2)
    assert [blocks._published[key] for key in blocks._chains[2][1:14]] == table[:13]
    assert blocks.reserve(3, 2 * blocks.num_free_blocks)
    blocks.release(3)
    assert [blocks._published[key] for key in blocks._chains[2][1:14]] == table[:13]
    blocks.check_integrity()
