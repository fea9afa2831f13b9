from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specdec.sequences import block_manager
from specdec.sequences.block_manager import BlockManager, root_key

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
        is_shorter = self.blocks.truncate(seq_id, num_tokens)
        after = self.blocks.block_table(seq_id)
        assert after == before[: self._blocks_of(num_tokens)]
        assert is_shorter == (len(after) < len(before))
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


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences that grow, are verified and end, beside a record of what each block holds.

    There are two token ids, so that prefixes are often equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.contents: dict[int, list[int]] = {}  # by block: all tokens up to the block's end
        self.tokens: dict[int, list[int]] = {}
        self.num_verified: dict[int, int] = {}

    @rule(seq_id=SEQ_IDS, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def begin(self, seq_id: int, prompt: list[int]) -> None:
        if seq_id in self.tokens:
            return
        num_cached = self.blocks.attach(seq_id, prompt, [root_key()])
        assert num_cached < len(prompt)
        assert num_cached % BLOCK_SIZE == 0
        table = self.blocks.block_table(seq_id)
        assert len(table) * BLOCK_SIZE == num_cached
        for index, block in enumerate(table):
            assert self.contents[block] == prompt[: (index + 1) * BLOCK_SIZE], "a wrong block"
        self.tokens[seq_id], self.num_verified[seq_id] = prompt, num_cached

    @rule(seq_id=SEQ_IDS, count=st.integers(1, 9), extra=st.integers(0, 5))
    def run(self, seq_id: int, count: int, extra: int) -> None:
        """Compute some tokens with slots for drafts after them, and free those slots."""
        if seq_id not in self.tokens:
            return
        tokens = self.tokens[seq_id]
        end = min(len(tokens), self.num_verified[seq_id] + count)
        if not self.blocks.reserve(seq_id, end + extra):
            return
        for index, block in enumerate(self.blocks.block_table(seq_id)):
            if (index + 1) * BLOCK_SIZE > self.num_verified[seq_id]:  # else it is written already
                self.contents[block] = tokens[: (index + 1) * BLOCK_SIZE]
        self.num_verified[seq_id] = end
        self.blocks.publish(seq_id, tokens, end)
        self.blocks.truncate(seq_id, end)

    @rule(seq_id=SEQ_IDS, token=st.integers(0, 1))
    def grow(self, seq_id: int, token: int) -> None:
        if seq_id in self.tokens and len(self.tokens[seq_id]) < 30:
            self.tokens[seq_id] = [*self.tokens[seq_id], token]

    @rule(seq_id=SEQ_IDS)
    def end(self, seq_id: int) -> None:
        self.blocks.release(seq_id)
        self.tokens.pop(seq_id, None)

    @invariant()
    def verified_tokens_keep_their_blocks(self) -> None:
        self.blocks.check_integrity()
        for seq_id, tokens in self.tokens.items():
            for index, block in enumerate(self.blocks.block_table(seq_id)):
                end = (index + 1) * BLOCK_SIZE
                if end <= self.num_verified[seq_id]:
                    assert self.contents[block] == tokens[:end]


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def _run_through(blocks: BlockManager, seq_id: int, tokens: list[int]) -> int:
    num_cached = blocks.attach(seq_id, tokens, [root_key()])
    assert blocks.reserve(seq_id, len(tokens))
    blocks.publish(seq_id, tokens, len(tokens))
    return num_cached


def test_a_prefix_is_reused_while_held_and_after_release() -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    prompt = list(range(10))
    assert _run_through(blocks, 1, prompt) == 0
    assert _run_through(blocks, 2, prompt) == 8
    assert blocks.block_table(1)[:2] == blocks.block_table(2)[:2]
    blocks.release(1)
    blocks.release(2)
    assert blocks.num_free_blocks == NUM_BLOCKS
    assert _run_through(blocks, 3, [*prompt[:8], 77, 78]) == 8


def test_the_last_token_is_never_cached() -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    _run_through(blocks, 1, list(range(8)))
    assert blocks.attach(2, list(range(8)), [root_key()]) == 4


def test_a_prefix_is_evicted_from_its_end_and_least_recently_used_first() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    _run_through(blocks, 1, [1] * 8)
    _run_through(blocks, 2, [2] * 8)
    blocks.release(1)
    blocks.release(2)
    assert blocks.reserve(3, BLOCK_SIZE)
    blocks.release(3)
    assert blocks.attach(4, [1] * 9, [root_key()]) == 4
    blocks.release(4)
    assert blocks.attach(5, [2] * 9, [root_key()]) == 8


def test_nothing_is_cached_when_turned_off_or_cleared() -> None:
    off = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    _run_through(off, 1, [1] * 9)
    assert off.attach(2, [1] * 9, [root_key()]) == 0
    cleared = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    _run_through(cleared, 1, [1] * 9)
    cleared.release(1)
    cleared.clear()
    cleared.check_integrity()
    assert cleared.attach(2, [1] * 9, [root_key()]) == 0


@given(num_tokens=st.integers(0, NUM_BLOCKS * BLOCK_SIZE))
def test_reserves_whole_blocks(num_tokens: int) -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    assert blocks.reserve(1, num_tokens)
    assert len(blocks.block_table(1)) == (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE


def test_integrity_check_finds_a_shared_block() -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    blocks.reserve(1, BLOCK_SIZE)
    blocks._tables[2] = list(blocks.block_table(1))
    with pytest.raises(AssertionError, match="is shared"):
        blocks.check_integrity()


def test_only_sequences_with_the_same_salt_share_blocks():
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    for seq_id, salt in enumerate(("", "a")):
        assert blocks.attach(seq_id, [1] * 9, [root_key(salt)]) == 0
        assert blocks.reserve(seq_id, 9)
        blocks.publish(seq_id, [1] * 9, 9)
    assert (
        blocks.attach(2, [1] * 9, [root_key("a")]) == blocks.attach(3, [1] * 9, [root_key()]) == 8
    )
    assert blocks.block_table(2) == blocks.block_table(1)[:2]
    assert blocks.block_table(3) == blocks.block_table(0)[:2]
    assert blocks.attach(4, [1] * 9, [root_key("b")]) == 0
    blocks.check_integrity()


def test_only_sequences_with_the_same_adapter_share_blocks():
    blocks = BlockManager(16, 4)
    for seq_id, adapter_id in enumerate((0, 1, 2)):
        assert blocks.attach(seq_id, [1] * 9, [root_key("", adapter_id)]) == 0
        assert blocks.reserve(seq_id, 9)
        blocks.publish(seq_id, [1] * 9, 8)
    cached = [blocks.attach(3 + each, [1] * 9, [root_key("", each)]) for each in (0, 1, 2, 3)]
    assert cached == [8, 8, 8, 0]


def test_keys_are_computed_once_for_a_sequence_that_waits(monkeypatch):
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    tokens = list(range(40))
    _run_through(blocks, 1, tokens)
    keys = [root_key()]
    hashing = Mock(wraps=block_manager.blake2b)
    monkeypatch.setattr(block_manager, "blake2b", hashing)
    for seq_id in range(5):
        assert blocks.attach(10 + seq_id, tokens, keys) == 36
    assert hashing.call_count == 9 == len(keys) - 1


def test_admission_holds_nothing_where_blocks_are_short():
    blocks = BlockManager(4, BLOCK_SIZE)
    assert blocks.admit(1, [1] * 9, 9, [root_key()]) == 0
    assert len(blocks.block_table(1)) == 3
    assert blocks.admit(2, [2] * 9, 9, [root_key()]) is None
    assert blocks.holders == {1}
    assert blocks.admit(2, [2] * 9, 4, [root_key()]) == 0
    assert blocks.admit(3, [3], 1, [root_key()]) is None
    blocks.check_integrity()


def test_admission_counts_a_cached_block_without_holder_once():
    """Of four free blocks two are cached: they are no room for the tokens after them."""
    blocks = BlockManager(4, BLOCK_SIZE)
    _run_through(blocks, 1, [1] * 8)
    blocks.release(1)
    assert blocks.admit(2, [1] * 20, 20, [root_key()]) is None
    assert blocks.admit(2, [1] * 16, 16, [root_key()]) == 8
    assert blocks.num_free_blocks == 0
    blocks.check_integrity()


def test_admission_without_reuse_computes_all_tokens():
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    _run_through(blocks, 1, [1] * 9)
    assert blocks.admit(2, [1] * 9, 9, [root_key()], reuse=False) == 0
    assert not set(blocks.block_table(1)) & set(blocks.block_table(2))


def test_a_sequence_without_root_key_cannot_publish():
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    assert blocks.reserve(1, 8)
    with pytest.raises(KeyError):
        blocks.publish(1, [1] * 8, 8)


def test_unpublished_keys_are_those_that_the_next_sequence_misses():
    blocks, tokens = BlockManager(NUM_BLOCKS, BLOCK_SIZE), list(range(14))
    keys, other = [root_key()], [root_key()]
    blocks.admit(1, tokens, 14, keys)
    assert blocks.unpublished_keys(1, tokens, 3) == []
    assert blocks.unpublished_keys(1, tokens, 9) == keys[1:3]
    assert blocks.missing_key(tokens, other) == keys[1]
    blocks.publish(1, tokens, 9)
    assert blocks.unpublished_keys(1, tokens, 12) == keys[3:4]
    assert blocks.missing_key(tokens, other) == keys[3]
    assert blocks.missing_key(tokens[:12], other) is None, "the last token is never cached"
    blocks.truncate(1, 8)
    blocks.check_integrity()


def test_no_key_without_prefix_caching():
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    blocks.admit(1, [1] * 9, 9, [root_key()])
    assert blocks.unpublished_keys(1, [1] * 9, 9) == []
    assert blocks.missing_key([1] * 9, [root_key()]) is None
