"""Sizes of the steps that a GPU runs as graphs, from the most sequences and draft tokens.

The ranks capture graphs for each of them, and the memory plan counts these graphs.

A step is padded to the next size. Up to about a hundred tokens its time is that of reading the
weights, and padding is nearly free; above, it is proportional to the tokens, padded ones included.
So few sequences have few lengths, and many sequences each length up to eight.
"""

from __future__ import annotations

MAX_GRAPH_ROWS = 512
"""Steps of more sequences run without a graph: there the arithmetic hides the launches."""

MAX_GRAPH_TOKENS = 2048
"""Tokens, padded ones included, above which a step runs without a graph, and without padding."""

MAX_NEW_DRAFT_TOKENS = 2
"""Most tokens of a sequence that a draft model's step on a GPU runs; with more the host drafts.

The first step of a draft has two where the target has accepted the whole draft before.
"""

MAX_EXCHANGED_LOGITS = 2**26
"""Logits of all ranks that these exchange at once; each then has up to 6 bytes for one of them."""

FEW_RAGGED_ROWS = 8
"""Sequences up to which a step with prompts has separate graphs: attention divides few contexts
among more programs."""

_RAGGED_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_FINE_ROWS = (1, 2, 4)
_ROW_STEP, _MANY_ROWS = 8, 64
_WIDE_ROW_STEP, _VERY_MANY_ROWS = 16, 256
_WIDEST_ROW_STEP = 32
_FEW_ROWS = 16
_COARSE_LENS, _FINE_LENS = (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
_LEN_STEP = 8
_TREE_LENS = (8, 16, 32)
_OPERATIONS_OF_LAUNCHES = 210_000_000_000


def row_counts(max_num_seqs: int) -> list[int]:
    """Return the numbers of sequences: 1, 2, 4, and multiples of 8, 16 and 32.

    They are of 8 up to 64, of 16 up to 256, then of 32. The last one is max_num_seqs, or
    MAX_GRAPH_ROWS. Above 64 sequences at most a fifth of a step is padding.
    """
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    counts = (
        *_FINE_ROWS,
        *range(_ROW_STEP, _MANY_ROWS + 1, _ROW_STEP),
        *range(_MANY_ROWS + _WIDE_ROW_STEP, _VERY_MANY_ROWS + 1, _WIDE_ROW_STEP),
        *range(_VERY_MANY_ROWS + _WIDEST_ROW_STEP, most, _WIDEST_ROW_STEP),
    )
    return [*(count for count in counts if count < most), most]


def query_lens(max_draft_tokens: int, num_rows: int) -> list[int]:
    """Return the numbers of tokens of each of `num_rows` sequences: 1 to 8, 12, every eighth.

    The last one is the last known token and max_draft_tokens after it, if MAX_GRAPH_TOKENS permits
    it. Steps of few sequences lack 5 and 7.
    """
    fine = _COARSE_LENS if num_rows <= _FEW_ROWS else _FINE_LENS
    most = 1 + max_draft_tokens
    lens = (*fine, *range(fine[-1] + _LEN_STEP, most, _LEN_STEP))
    lens = (*(length for length in lens if length < most), most)
    return [length for length in lens if num_rows * length <= MAX_GRAPH_TOKENS]


def tree_lens(max_tree_nodes: int, num_rows: int) -> list[int]:
    """Return the numbers of tokens of each of `num_rows` sequences in a step with trees of drafts.

    8, 16, 32, and the last known token with max_tree_nodes after it, as MAX_GRAPH_TOKENS permits.
    There are few, since most trees have all the nodes that they may have.
    """
    most = 1 + max_tree_nodes
    lens = (*(length for length in _TREE_LENS if length < most), most)
    return [length for length in lens if num_rows * length <= MAX_GRAPH_TOKENS]


def most_padding_tokens(hidden_size: int) -> int:
    """Return the padding of a step above which it runs faster by operators, without padding.

    Launching a layer's operators takes about 0.35 ms of the host; a token takes a layer of a Llama,
    which has about 12 hidden_size^2 weights, 24 hidden_size^2 operations, at 6e14 in a second: the
    rates of an H100. Both are in proportion to the layers.
    """
    return _OPERATIONS_OF_LAUNCHES // (24 * hidden_size**2)


def ragged_token_counts(max_num_tokens: int, hidden_size: int) -> list[int]:
    """Return the tokens of steps with prompts that have graphs, of all sequences together.

    max_num_tokens: of a step; 0 where none has prompts. Beyond `most_padding_tokens` the
    arithmetic hides the launches, and a step has no padding.
    """
    if not max_num_tokens:
        return []
    most = min(max_num_tokens, MAX_GRAPH_TOKENS)
    counts = [*(count for count in _RAGGED_TOKENS if count < most), most]
    return [count for count in counts if count <= most_padding_tokens(hidden_size)]


def ragged_row_counts(max_num_seqs: int) -> list[int]:
    """Return the numbers of sequences of these graphs: few, and as many as there may be."""
    return sorted({min(FEW_RAGGED_ROWS, max_num_seqs), max_num_seqs})


def num_ragged_graphs(max_num_seqs: int, max_num_tokens: int, hidden_size: int) -> int:
    """Return the number of graphs of steps with prompts, without trees; at most 28."""
    counts = ragged_token_counts(max_num_tokens, hidden_size)
    return len(counts) * len(ragged_row_counts(max_num_seqs))


def num_graph_sizes(max_num_seqs: int, max_draft_tokens: int) -> int:
    """Return the number of pairs of both; at most 280, whatever the arguments are."""
    return sum(len(query_lens(max_draft_tokens, rows)) for rows in row_counts(max_num_seqs))


def num_growth_sizes(max_num_seqs: int, max_tree_nodes: int, max_scored_tokens: int) -> int:
    """Return the numbers of sequences of which a head drafts trees on the device.

    max_scored_tokens: of a step, which has to hold the trees; none are drafted for more sequences.
    """
    if not max_tree_nodes:
        return 0
    most = max_scored_tokens // (1 + max_tree_nodes)
    return sum(rows <= most for rows in row_counts(max_num_seqs))


def num_tree_sizes(max_num_seqs: int, max_tree_nodes: int) -> int:
    """Return the number of sizes of steps with trees; at most 60, whatever the arguments are."""
    if not max_tree_nodes:
        return 0
    return sum(len(tree_lens(max_tree_nodes, rows)) for rows in row_counts(max_num_seqs))
