"""Splits of queries and contexts in attention.

The ranks compute with them, and the memory plan of a GPU counts the results of the parts.
"""

from __future__ import annotations

MAX_SHORT_QUERY_TOKENS = 16
"""Queries up to this length (decode, drafts) share padding, and their contexts are split on a GPU;
longer chunks do not. In a step on the device without prompts all contexts are split."""

SEGMENT_TOKENS = 256
"""Tokens of the first segments of a context."""

SEGMENTS_PER_LEVEL = 32
"""After each 32 segments their length doubles, so that long contexts have few."""

SHORT_TILES = (16, 32, 64)
"""Rows of a tile of short queries: the fewest that hold the longest one of a batch."""

_MOST_NARROW_DIM = 256

_MOST_FLOAT32_SUMS = 4096
"""Values of a tile in float32: without matrix units the queries are in registers, too."""

ENOUGH_PROGRAMS = 132
"""Programs of a launch that give each multiprocessor of an H100 or H200 one.

A constant, so that launches are those of any GPU.
"""

_FEW_ROWS = 8
_MULTIPLE_OF_FEW_ROWS = 4


def enough_programs(used_rows: int) -> int:
    """Return the programs of a launch from which on no context is split.

    used_rows: of a tile. Parts of few rows are small beside the KV that they are computed from, so
    they pay for more programs: these then end together.
    """
    return ENOUGH_PROGRAMS * (_MULTIPLE_OF_FEW_ROWS if used_rows <= _FEW_ROWS else 1)


def most_part_rows(used_rows: int) -> int:
    """Return the most rows of a segment's parts in one launch, of tiles of up to `used_rows`."""
    sizes = (used_rows, min(used_rows, _FEW_ROWS))
    return max(rows * (enough_programs(rows) - 1) for rows in sizes)


def num_segments_of(context_len: int) -> int:
    """Return the number of segments of a context: 32 of 256 tokens, 32 of 512, and so on."""
    level = 0
    while context_len > ((2 << level) - 1) * SEGMENT_TOKENS * SEGMENTS_PER_LEVEL:
        level += 1
    rest = context_len - ((1 << level) - 1) * SEGMENT_TOKENS * SEGMENTS_PER_LEVEL
    return level * SEGMENTS_PER_LEVEL + -(-rest // (SEGMENT_TOKENS << level))


def has_matrix_units(element_size: int) -> bool:
    """Return whether matrix units multiply numbers of `element_size` bytes in attention."""
    return element_size <= 2


def short_tiles(value_dim: int, element_size: int = 2) -> tuple[int, ...]:
    """Return the rows of tiles of short queries, whose sums of values must fit into registers.

    element_size: bytes of a number of the queries; with 4, tiles of long ones have no more rows.
    Groups of more query heads exceed this: a tile has a row for each head of a group.
    """
    if not has_matrix_units(element_size):
        fitting = tuple(rows for rows in SHORT_TILES if rows * value_dim <= _MOST_FLOAT32_SUMS)
        return fitting or SHORT_TILES[:1]
    return SHORT_TILES if value_dim <= _MOST_NARROW_DIM else SHORT_TILES[:2]


def heads_per_program(num_heads: int) -> int:
    """Return the heads of a program where all heads share one key: at most 32, evenly divided."""
    num_programs = -(-num_heads // SHORT_TILES[1])
    return -(-num_heads // num_programs)


def most_rows(heads_per_kv: int, value_dim: int, query_len: int = 1) -> int:
    """Return the most rows in use of a tile whose contexts are split: whole groups, by token.

    query_len: most tokens of a sequence that decodes, drafts included.
    """
    num_rows = max(short_tiles(value_dim)[-1], 1 << (heads_per_kv - 1).bit_length())
    most_tokens = max(MAX_SHORT_QUERY_TOKENS, query_len)
    return min(most_tokens * heads_per_kv, num_rows // heads_per_kv * heads_per_kv)
