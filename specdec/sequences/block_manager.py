"""Paged KV-cache allocator with prefix sharing.

Prefix caching as in vLLM and SGLang: a full block of verified tokens is *published* under a key
that identifies its tokens and all before them. A later sequence with the same prefix reuses the
block. A published block without a holder stays in the cache until its memory is needed.

Where a model has recurrent layers, a sequence reuses the blocks before a snapshot of their states.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct

from specdec.config.engine import EngineConfig
from specdec.sequences.state_snapshots import StateSnapshots
from specdec.types.messages import BASE_MODEL, Snapshot
from specdec.types.reports.stats import Counts

BlockKey = bytes
"""128 bits of BLAKE2b over the previous block's key and the block's own tokens; a hash of the
sequence's salt and adapter replaces the key before the first block."""


@lru_cache
def root_key(salt: str = "", adapter_id: int = BASE_MODEL) -> BlockKey:
    """Return the key before a sequence's first block.

    Blocks are shared only among sequences with the same salt and adapter.
    """
    adapter = adapter_id.to_bytes(16, "little")  # beside the salt, which may hold any characters
    return blake2b(salt.encode(), digest_size=16, person=adapter).digest()


class BlockManager:
    """Allocates fixed-size KV blocks. Only published blocks are shared between sequences."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """block_size: in tokens. Without prefix caching nothing is published or reused.

        snapshots: of recurrent layers; None where no state is needed, or nothing is reused.
        """
        self.num_blocks = num_blocks
        self.snapshots = snapshots
        self.block_size = block_size
        self._is_caching = enable_prefix_caching
        self._packed = Struct(f"<{block_size}i").pack
        # Blocks without a holder, the next to allocate first: those without contents, most recently
        # freed first because it is warm; then the published ones, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_holders = [0] * num_blocks
        self._tables: dict[int, list[int]] = {}
        # By sequence with blocks: its root key, then the known keys of its first blocks; the
        # published blocks are the first of these.
        self._chains: dict[int, list[BlockKey]] = {}
        self._num_published_of: dict[int, int] = {}
        self._published: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}  # the inverse of _published

    @classmethod
    def of(cls, config: EngineConfig, counts: Counts, *, has_states: bool) -> BlockManager:
        """Return the blocks of an engine. has_states: whether its model has recurrent layers."""
        is_caching, snapshots = config.enable_prefix_caching, None
        if is_caching and has_states:
            slots = config.num_snapshots, config.snapshot_interval
            snapshots = StateSnapshots(*slots, config.block_size, counts)
        return cls(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=is_caching,
            snapshots=snapshots,
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones without a holder included."""
        return len(self._free)

    @property
    def num_free_slots(self) -> int:
        """Tokens that the free blocks have room for."""
        return len(self._free) * self.block_size

    @property
    def num_snapshots(self) -> int | None:
        """Snapshots of states; None where none are taken."""
        return None if self.snapshots is None else len(self.snapshots)

    @property
    def holders(self) -> frozenset[int]:
        """Ids of the sequences that hold a block."""
        return frozenset(seq_id for seq_id, table in self._tables.items() if table)

    def block_table(self, seq_id: int) -> list[int]:
        """Return the blocks of a sequence in order; empty if it holds none."""
        return self._tables.get(seq_id, [])

    def attach(self, seq_id: int, token_ids: Sequence[int], keys: list[BlockKey]) -> int:
        """Give a sequence without blocks the published ones of its longest cached prefix.

        keys: its root key, which `root_key` returns, then the keys of its first blocks as far as
            they are known. Keys computed here and in later calls are appended.

        Returns the number of cached tokens: whole blocks, and never all of `token_ids`, since the
        last token must be computed to sample the next.
        """
        return self._hold_prefix(seq_id, self._cached_prefix(token_ids, keys), keys)

    def admit(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        budget: int,
        keys: list[BlockKey],
        *,
        reuse: bool = True,
    ) -> int | None:
        """Attach a sequence, and reserve blocks for up to `budget` tokens after the cached ones.

        reuse: False computes the whole of `token_ids`, cached or not. Returns the number of cached
        tokens; None, with nothing held, where too few blocks are free.
        """
        if not self._free:
            return None  # at least one block is new: the last token is never cached
        prefix = self._cached_prefix(token_ids, keys) if reuse else []
        cached_keys = keys[: len(prefix) + 1]
        if self.snapshots is not None:
            del prefix[self.snapshots.num_usable(cached_keys) :]
        num_cached = len(prefix) * self.block_size
        end = min(len(token_ids), num_cached + budget)
        num_taken = sum(self._num_holders[block] == 0 for block in prefix)
        if self._blocks_for(end) - len(prefix) + num_taken > len(self._free):
            return None
        if self.snapshots is not None:
            self.snapshots.admit(seq_id, cached_keys, len(prefix), len(token_ids))
        self._hold_prefix(seq_id, prefix, keys)
        has_room = self.reserve(seq_id, end)
        assert has_room, "free blocks were counted wrongly"
        return num_cached

    def publish(self, seq_id: int, token_ids: Sequence[int], num_tokens: int) -> None:
        """Add the full blocks of a sequence's first `num_tokens` tokens to the prefix cache.

        The sequence must be attached, their KV computed and the tokens verified. A block whose
        contents another block has already published is added in its place if that has no holder.
        """
        keys = self.unpublished_keys(seq_id, token_ids, num_tokens)
        if not keys:
            return
        first = self._num_published_of[seq_id]
        self._num_published_of[seq_id] = first + len(keys)
        for index, key in enumerate(keys, first):
            known = self._published.get(key)
            if known is None or not self._num_holders[known]:
                if known is not None:
                    del self._keys[known]
                    self._free.move_to_end(known, last=False)
                block = self._tables[seq_id][index]
                self._published[key] = block
                self._keys[block] = key

    def unpublished_keys(
        self, seq_id: int, token_ids: Sequence[int], num_tokens: int
    ) -> list[BlockKey]:
        """Return the keys of the blocks that `publish` would add to the prefix cache."""
        first, end = self._num_published_of[seq_id], num_tokens // self.block_size
        if end <= first or not self._is_caching:
            return []
        chain = self._chains[seq_id]
        self._extend(chain, token_ids, end)
        return chain[first + 1 : end + 1]

    def missing_key(self, token_ids: Sequence[int], keys: list[BlockKey]) -> BlockKey | None:
        """Return the key of the first block that `admit` would not find cached.

        None where it would find all that it may use. keys: as in `attach`.
        """
        index = len(self._cached_prefix(token_ids, keys)) + 1
        is_missing = self._is_caching and index * self.block_size < len(token_ids)
        return keys[index] if is_missing else None

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Extend a sequence's table to hold `num_tokens`; return False, unchanged, if it cannot."""
        table = self._tables.setdefault(seq_id, [])
        missing = self._blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        table += self._take(missing)
        return True

    def truncate(self, seq_id: int, num_tokens: int) -> bool:
        """Free the blocks of a sequence that lie wholly past its first `num_tokens`.

        Published blocks are verified and stay. Returns whether any block was freed.
        """
        num_published = self._num_published_of.get(seq_id, 0)
        assert num_tokens >= num_published * self.block_size, "truncated into verified tokens"
        num_kept = self._blocks_for(num_tokens)
        if len(self.block_table(seq_id)) <= num_kept:
            return False
        self._keep(seq_id, num_kept)
        return True

    def release(self, seq_id: int) -> None:
        """Free every block of a sequence, which may hold none."""
        self._keep(seq_id, 0)
        self._tables.pop(seq_id, None)
        self._chains.pop(seq_id, None)
        self._num_published_of.pop(seq_id, None)
        if self.snapshots is not None:
            self.snapshots.release(seq_id)

    def resumption(self, seq_id: int) -> Snapshot | None:
        """Return the snapshot that the states of an admitted sequence begin with, if any."""
        return None if self.snapshots is None else self.snapshots.resumption(seq_id)

    def end_save(self, seq_id: int, slot: int, key: BlockKey | None) -> None:
        """Keep a snapshot that the ranks have taken of a sequence's states, unless it is of no use.

        key: of the block after which it was taken; None where the states are invalid. Without this
        block in the cache no sequence could use it.
        """
        assert self.snapshots is not None, "a snapshot of a model without states"
        self.snapshots.end_save(seq_id, slot, key if key in self._published else None)

    def clear(self) -> None:
        """Empty the prefix cache, as when the KV is lost. No sequence may hold a block."""
        assert not self.holders, "clear while sequences hold blocks"
        self._published.clear()
        self._keys.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def check_integrity(self) -> None:
        """Assert that no block is lost and that only published blocks are shared."""
        held = Counter(block for table in self._tables.values() for block in table)
        for block, count in held.items():
            assert count == 1 or block in self._keys, "a block without published contents is shared"
        assert set(self._free) == set(range(self.num_blocks)) - set(held), "blocks lost"
        assert all(count == held[block] for block, count in enumerate(self._num_holders))
        assert self._keys == {block: key for key, block in self._published.items()}
        if self.snapshots is not None:
            self.snapshots.check_integrity(self._tables.keys(), self._published.keys())

    def _cached_prefix(self, token_ids: Sequence[int], keys: list[BlockKey]) -> list[int]:
        """Return the published blocks of the longest cached prefix."""
        blocks: list[int] = []
        while self._is_caching and (len(blocks) + 1) * self.block_size < len(token_ids):
            self._extend(keys, token_ids, len(blocks) + 1)
            block = self._published.get(keys[len(blocks) + 1])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hold_prefix(self, seq_id: int, prefix: list[int], keys: list[BlockKey]) -> int:
        assert not self.block_table(seq_id), "a sequence that holds blocks is attached"
        for block in prefix:
            self._hold(block)
        self._tables[seq_id], self._chains[seq_id] = prefix, keys
        self._num_published_of[seq_id] = len(prefix)
        return len(prefix) * self.block_size

    def _extend(self, chain: list[BlockKey], token_ids: Sequence[int], num_blocks: int) -> None:
        """Append the keys that a chain lacks of the first `num_blocks` blocks."""
        size, pack, key = self.block_size, self._packed, chain[-1]
        for start in range((len(chain) - 1) * size, num_blocks * size, size):
            tokens = pack(*token_ids[start : start + size])
            key = blake2b(key + tokens, digest_size=16).digest()
            chain.append(key)

    def _take(self, count: int) -> list[int]:
        """Return free blocks, evicted from the prefix cache."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            key = self._keys.pop(block, None)
            if key is not None:
                del self._published[key]
                if self.snapshots is not None:
                    self.snapshots.drop(key)
            self._num_holders[block] = 1
            blocks.append(block)
        return blocks

    def _keep(self, seq_id: int, num_blocks: int) -> None:
        """Free the blocks of a sequence after the first ones."""
        table, free, holders = self._tables.get(seq_id, []), self._free, self._num_holders
        for block in reversed(table[num_blocks:]):  # so that a prefix is lost from its end
            holders[block] -= 1
            if holders[block]:
                continue
            free[block] = None
            key = self._keys.get(block)
            if key is None:
                free.move_to_end(block, last=False)
            elif self.snapshots is not None:
                self.snapshots.touch(key)
        del table[num_blocks:]

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._num_holders[block] += 1

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
