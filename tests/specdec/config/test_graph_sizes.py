"""Sizes of captured steps."""

from itertools import pairwise

import pytest

from specdec.config.graph_sizes import num_graph_sizes, query_lens, row_counts


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 65, 96, 100, 256])
def test_row_counts_reach_the_most_sequences_with_little_padding(most):
    counts = row_counts(most)
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] == most
    for before, count in pairwise(counts):
        assert count <= 2 * before
        assert before < 64 or count - before <= before / 2


def test_very_large_steps_have_no_graph():
    assert row_counts(4096)[-1] == 512


@pytest.mark.parametrize("most", range(20))
def test_query_lens_hold_a_token_and_the_most_drafts(most):
    lens = query_lens(most, 64)
    assert lens == sorted(set(lens))
    assert lens[0] == 1
    assert lens[-1] == most + 1
    assert all(after - before <= 4 for before, after in pairwise(lens))
    assert query_lens(most, 65) == sorted({1, most + 1})


def test_the_sizes_are_pairs():
    assert num_graph_sizes(96, 3) == 11 * 4 + 1 * 2
