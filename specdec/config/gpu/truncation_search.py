"""Sizes of the search for the floors of truncation on a GPU.

The kernels compute with them (`kernels.triton.truncation`), and the memory plan of a GPU counts
what the search keeps of each row.
"""

from __future__ import annotations

TILE_TOKENS = 2048
"""Tokens of a row that a program weighs at once."""

NUM_THRESHOLDS = 16
"""Scores that a round of the search compares tokens with."""

MAX_CANDIDATES = 2048
"""Tokens of a row that one program searches in registers."""


def search_bytes(vocab_size: int) -> int:
    """Return the bytes of the search of one row: candidates, and the weights of two rounds."""
    float32_bytes, state_bytes = 4, 512
    num_tiles = -(-vocab_size // TILE_TOKENS)
    words = MAX_CANDIDATES + 2 * num_tiles * NUM_THRESHOLDS
    return words * float32_bytes + state_bytes
