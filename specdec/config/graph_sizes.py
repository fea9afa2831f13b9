"""Sizes of the steps that a GPU runs as graphs, from the most sequences and draft tokens.

The ranks capture graphs for each of them, and the memory plan counts these graphs.
"""

from __future__ import annotations

MAX_GRAPH_ROWS = 512
"""Steps of more sequences run without a graph: there the launches hide behind the arithmetic."""

_FINE_ROWS = (1, 2, 4)
_ROW_STEP, _WIDE_ROW_STEP = 8, 32
_MANY_ROWS = 64
_FINE_LENS, _LEN_STEP = (1, 2, 3, 4, 6, 8), 4


def row_counts(max_num_seqs: int) -> list[int]:
    """Return the numbers of sequences: 1, 2, 4, the multiples of 8 up to 64, then those of 32.

    The last one is max_num_seqs, or MAX_GRAPH_ROWS. Above 64 sequences at most a third of a step is
    padding.
    """
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    fine = range(_ROW_STEP, _MANY_ROWS + 1, _ROW_STEP)
    wide = range(_MANY_ROWS + _WIDE_ROW_STEP, most, _WIDE_ROW_STEP)
    return [*(count for count in (*_FINE_ROWS, *fine, *wide) if count < most), most]


def query_lens(max_draft_tokens: int, num_rows: int) -> list[int]:
    """Return the numbers of tokens of each of `num_rows` sequences: 1 to 4, 6, 8, every fourth.

    The last one is the last known token and max_draft_tokens behind it. Steps of many sequences
    have only that one and 1.
    """
    most = 1 + max_draft_tokens
    fine = _FINE_LENS if num_rows <= _MANY_ROWS else _FINE_LENS[:1]
    coarse = range(_FINE_LENS[-1] + _LEN_STEP, most, _LEN_STEP) if num_rows <= _MANY_ROWS else ()
    return [*(length for length in (*fine, *coarse) if length < most), most]


def num_graph_sizes(max_num_seqs: int, max_draft_tokens: int) -> int:
    """Return the number of pairs of both."""
    return sum(len(query_lens(max_draft_tokens, rows)) for rows in row_counts(max_num_seqs))
