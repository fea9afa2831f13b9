"""The pool of KV blocks, and which sequence holds which."""

from __future__ import annotations


class BlockManager:
    """Hands out fixed-size KV blocks. A block belongs to at most one sequence, or is free."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`block_size` is in tokens."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last one freed is warm
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def holders(self) -> frozenset[int]:
        """The sequences that hold a block."""
        return frozenset(seq_id for seq_id, table in self._tables.items() if table)

    def block_table(self, seq_id: int) -> list[int]:
        """The blocks of a sequence in order; empty when it holds none."""
        return self._tables.get(seq_id, [])

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Extends a sequence's table to hold `num_tokens`; False, and no change, if it can't."""
        table = self._tables.get(seq_id, [])
        missing = self._blocks_for(num_tokens) - len(table)
        if missing > len(self._free):
            return False
        if missing > 0:
            taken = [self._free.pop() for _ in range(missing)]
            self._tables[seq_id] = table + taken
        return True

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Frees the blocks of a sequence that lie wholly past its first `num_tokens`."""
        table = self._tables.get(seq_id, [])
        keep = self._blocks_for(num_tokens)
        self._free.extend(reversed(table[keep:]))
        del table[keep:]

    def release(self, seq_id: int) -> None:
        """Frees every block of a sequence; one that holds none is no error."""
        self.truncate(seq_id, 0)
        self._tables.pop(seq_id, None)

    def check_integrity(self) -> None:
        """Asserts that every block is either free or in one table, once."""
        held = [block for table in self._tables.values() for block in table]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "blocks lost or shared"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
