"""Sizes of captured steps."""

from itertools import pairwise

import pytest

from specdec.config.gpu.graph_sizes import (
    MAX_GRAPH_TOKENS,
    most_padding_tokens,
    num_graph_sizes,
    num_growth_sizes,
    num_ragged_graphs,
    num_tree_sizes,
    query_lens,
    ragged_row_counts,
    ragged_token_counts,
    row_counts,
    tree_lens,
)
from specdec.types.drafts.draft_decision import trees


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 65, 96, 100, 256, 500])
def test_row_counts_reach_the_most_sequences_with_little_padding(most):
    counts = row_counts(most)
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] == most
    for before, count in pairwise(counts):
        assert count <= 2 * before
        assert before < 64 or count - before <= before / 4


def test_very_large_steps_have_no_graph():
    assert row_counts(4096)[-1] == 512


@pytest.mark.parametrize("most", range(20))
def test_query_lens_hold_a_token_and_the_most_drafts(most):
    for rows in (1, 16, 17, 64):
        lens = query_lens(most, rows)
        assert lens == sorted(set(lens))
        assert lens[0] == 1
        assert lens[-1] == most + 1
        assert all(after - before <= 4 for before, after in pairwise(lens))


@pytest.mark.parametrize("most", [1, 3, 5, 8])
def test_padding_is_at_most_a_third_where_it_costs_time(most):
    """Steps of many sequences take time by their tokens."""
    counts = row_counts(256)
    for rows in range(33, 257):
        bucket = next(count for count in counts if count >= rows)
        lens = query_lens(most, bucket)
        for length in range(1, most + 2):
            padded = next((each for each in lens if each >= length), None)
            if padded is None:
                assert bucket * length > MAX_GRAPH_TOKENS
            else:
                assert bucket * padded <= 4 / 3 * rows * length


@pytest.mark.parametrize(("rows", "longest"), [(256, 8), (512, 4), (128, 16)])
def test_a_step_of_very_many_tokens_has_no_graph(rows, longest):
    assert query_lens(20, rows)[-1] == longest


def test_the_sizes_are_pairs():
    assert num_graph_sizes(96, 3) == 13 * 4
    assert num_graph_sizes(256, 5) == 5 * 5 + 18 * 6


def test_the_most_sizes_are_bounded():
    """Capturing four graphs of a size of 8B takes about 50 ms on an H100."""
    assert max(num_graph_sizes(seqs, most) for seqs in (256, 512, 1024) for most in (8, 32)) <= 280


def test_steps_with_trees_have_few_sizes():
    """Trees of all nodes have no padding."""
    assert tree_lens(12, 1) == [8, 13]
    assert tree_lens(64, 4) == [8, 16, 32, 65]
    assert tree_lens(64, 1)[:-1] == [1 + each.num_draft_tokens for each in trees(64, 4)[:0:-1]]
    assert tree_lens(24, 100) == [8, 16]
    assert tree_lens(24, 512) == []
    assert num_tree_sizes(8, 0) == 0
    assert num_tree_sizes(8, 24) == 4 * 3
    most = (num_tree_sizes(seqs, nodes) for seqs in (64, 256, 1024) for nodes in (2, 8, 33, 64))
    assert max(most) <= 60


def test_trees_grow_for_as_many_sequences_as_the_next_step_holds():
    assert num_growth_sizes(8, 0, 2048) == 0
    assert num_growth_sizes(8, 24, 200) == 4
    assert num_growth_sizes(8, 24, 199) == 3


def test_small_models_are_padded_further():
    """Launching operators costs a step of Llama-3.1-8B as much as 521 tokens of padding."""
    assert most_padding_tokens(4096) == 521
    assert most_padding_tokens(2048) > 2000
    assert most_padding_tokens(8192) < 131


@pytest.mark.parametrize("most", [1, 20, 64, 300, 2048, 100_000])
def test_steps_with_prompts_have_little_padding_up_to_the_largest_graph(most):
    counts = ragged_token_counts(most, 576)
    assert counts == sorted(set(counts))
    assert counts[-1] == min(most, MAX_GRAPH_TOKENS)
    assert all(after <= max(16, 2 * before) for before, after in pairwise(counts))
    assert all(after <= 1.5 * before for before, after in pairwise(counts) if before >= 32)


def test_long_prompts_of_large_models_have_no_graph():
    """Their arithmetic hides the launches."""
    assert ragged_token_counts(2048, 4096)[-1] == 512
    assert ragged_token_counts(0, 4096) == []
    assert ragged_row_counts(4) == [4]
    assert ragged_row_counts(64) == [8, 64]
    assert num_ragged_graphs(256, 2048, 576) == 28
    assert num_ragged_graphs(256, 2048, 4096) == 20
