import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specdec.block_manager import BlockManager

BLOCK_SIZE = 4
NUM_BLOCKS = 12
SEQ_IDS = st.integers(0, 5)


class BlockManagerMachine(RuleBasedStateMachine):
    """Random operations beside a model that knows only each sequence's length in tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.lengths: dict[int, int] = {}

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE)

    @rule(seq_id=SEQ_IDS, num_tokens=st.integers(0, 30))
    def reserve(self, seq_id: int, num_tokens: int) -> None:
        before = list(self.blocks.block_table(seq_id))
        missing = self._blocks_of(num_tokens) - len(before)
        fits = missing <= self.blocks.num_free_blocks
        assert self.blocks.reserve(seq_id, num_tokens) is fits
        after = self.blocks.block_table(seq_id)
        assert after[: len(before)] == before, "a reservation moved blocks that hold KV"
        if fits:
            self.lengths[seq_id] = max(self.lengths.get(seq_id, 0), num_tokens)
        else:
            assert after == before

    @rule(seq_id=SEQ_IDS, num_tokens=st.integers(0, 30))
    def truncate(self, seq_id: int, num_tokens: int) -> None:
        before = list(self.blocks.block_table(seq_id))
        self.blocks.truncate(seq_id, num_tokens)
        assert self.blocks.block_table(seq_id) == before[: self._blocks_of(num_tokens)]
        if seq_id in self.lengths:
            self.lengths[seq_id] = min(self.lengths[seq_id], num_tokens)

    @rule(seq_id=SEQ_IDS)
    def release(self, seq_id: int) -> None:
        self.blocks.release(seq_id)
        self.lengths.pop(seq_id, None)
        assert self.blocks.block_table(seq_id) == []

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.blocks.check_integrity()
        held = sum(len(self.blocks.block_table(seq_id)) for seq_id in range(6))
        assert held + self.blocks.num_free_blocks == NUM_BLOCKS
        for seq_id, num_tokens in self.lengths.items():
            assert len(self.blocks.block_table(seq_id)) >= self._blocks_of(num_tokens)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(num_tokens=st.integers(0, NUM_BLOCKS * BLOCK_SIZE))
def test_reserves_whole_blocks(num_tokens: int) -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    assert blocks.reserve(1, num_tokens)
    assert len(blocks.block_table(1)) == (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE


def test_integrity_check_finds_a_shared_block() -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    blocks.reserve(1, BLOCK_SIZE)
    blocks._tables[2] = list(blocks.block_table(1))
    with pytest.raises(AssertionError, match="lost or shared"):
        blocks.check_integrity()
