"""Trees of the lookup proposers: several continuations, the best chain first."""

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.speculation.methods import NgramConfig, SuffixConfig
from specdec.speculation.proposers import DraftRequest
from specdec.speculation.proposers.ngram import NgramProposer
from specdec.speculation.proposers.suffix import SuffixProposer
from specdec.speculation.proposers.suffix_tree import SuffixTree
from specdec.types.drafts.draft_tree import depths, first_path, paths, require_tree
from tests.specdec.speculation.proposers.sequences import drafts, sequence

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
PROPOSERS = [
    lambda: NgramProposer(NgramConfig(1, 3)),
    lambda: SuffixProposer(SuffixConfig(24, 0, 4.0, 0.0)),
]


def proposed(proposer, seq, depth, num_nodes):
    [proposal] = proposer.take([DraftRequest(seq, depth, max_nodes=num_nodes)])
    return proposal


@pytest.mark.parametrize("make", PROPOSERS, ids=["ngram", "suffix"])
@given(TOKENS, st.integers(1, 5), st.integers(1, 12))
def test_trees_respect_depth_and_size_and_siblings_differ(make, tokens, depth, more):
    tree = proposed(make(), sequence(1, tokens), depth, depth + more)
    parents = tree.parents or ()
    require_tree(parents)
    assert len(tree.draft_token_ids) == len(parents) <= depth + more
    assert max(depths(parents), default=0) <= depth
    edges = Counter(zip(parents, tree.draft_token_ids, strict=True))
    assert max(edges.values(), default=1) == 1
    for path in paths(parents):
        nodes = [tree.draft_token_ids[node] for node in path]
        follows = [tokens[i : i + 1] for i in range(1, len(tokens) + 1)]
        assert [nodes[0]] in follows  # it has occurred in the text


@given(TOKENS, st.integers(1, 5), st.integers(1, 12))
def test_the_first_path_of_an_ngram_tree_is_the_chain(tokens, depth, more):
    tree = proposed(NgramProposer(NgramConfig(1, 3)), sequence(1, tokens), depth, depth + more)
    [chain] = drafts(NgramProposer(NgramConfig(1, 3)), sequence(1, tokens), count=depth)
    path = first_path(tree.parents or ())
    assert tuple(tree.draft_token_ids[node] for node in path) == chain


def test_an_ngram_tree_branches_where_occurrences_differ():
    text = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2, 9, 9, 1, 2]
    tree = proposed(NgramProposer(NgramConfig(2, 3)), sequence(1, text), 2, 6)
    assert tree.draft_token_ids == (9, 9, 8, 8, 7, 7)
    assert tree.parents == (-1, 0, -1, 2, -1, 4)


def test_a_longer_match_comes_before_a_later_one():
    text = [5, 1, 2, 7, 1, 2, 8, 5, 1, 2]
    tree = proposed(NgramProposer(NgramConfig(2, 3)), sequence(1, text), 1, 3)
    assert tree.draft_token_ids == (7, 8)


def test_a_suffix_tree_drafts_the_most_frequent_branches():
    text = [1, 2, 7, 3, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2, 7, 3, 1, 2]
    tree = proposed(SuffixProposer(SuffixConfig(24, 0, 4.0, 0.0)), sequence(1, text), 2, 5)
    by_path = {tuple(tree.draft_token_ids[i] for i in path) for path in paths(tree.parents)}
    # The longest match continues with 7, 4; shorter ones with other tokens too.
    assert by_path == {(7,), (7, 4), (7, 3), (8,), (8, 5)}
    assert tree.draft_token_ids[:2] == (7, 4)


def test_improbable_branches_are_left_out():
    text = [1, 2, 7] * 9 + [1, 2, 8] + [1, 2]
    tree = proposed(SuffixProposer(SuffixConfig(24, 0, 4.0, 0.15)), sequence(1, text), 1, 5)
    assert tree.draft_token_ids == (7,)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=20), st.integers(1, 10))
def test_branches_are_the_most_probable_pieces(ids, num_nodes):
    """Against plain counting of pieces after a token, up to three tokens long."""
    text, tree = array("i", ids), SuffixTree(5)
    for start in range(len(text)):
        tree.add(text, start)
    place = tree.find(text[:1])
    found = tree.branches(place, num_nodes, 3, 0.0)
    counts = Counter(
        tuple(text[start + 1 : start + 1 + size])
        for start in range(len(text))
        for size in (1, 2, 3)
        if text[start] == text[0] and start + 1 + size <= len(text)
    )
    total = list(text).count(text[0])
    pieces = [tuple(found.token_ids[i] for i in path) for path in paths(found.parents)]
    assert len(set(pieces)) == len(pieces) == min(num_nodes, len(counts))
    best = sorted(counts.values(), reverse=True)[: len(pieces)]
    assert [counts[piece] for piece in pieces] == best
    assert found.score == pytest.approx(sum(best) / total)


def test_a_chain_is_drafted_where_no_tree_is_wanted():
    text = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2]
    for make in PROPOSERS:
        assert proposed(make(), sequence(1, text), 2, 2).parents is None
